"""Ten lines from nothing to a trained GPT: Python's own standard library as text, two ranks as a token pipeline."""

import terapipe_c as tp

model = tp.GPTConfig(n_layer=4, n_head=4, n_embd=128, vocab_size=256, block_size=256)
costs = tp.profile(model, seq_len=256)
plan = tp.plan(model, tp.Cluster.local(), batch=4, seq_len=256, costs=costs, stages=2)
print(plan.explain())

text = tp.stdlib_corpus("stdlib.txt", max_bytes=4_000_000)
run = tp.launch(plan, data=str(text), steps=100, lr=2e-3, warmup_steps=10, out="runs/stdlib")
run.wait()
print(run.report())

trained = tp.load_checkpoint(run.checkpoint_path)
print(tp.generate(trained.params, trained.model, "def ", n=200))
