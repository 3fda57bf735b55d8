"""How ``tp.plan`` finds a plan, in the order in which a request goes through.

``request`` checks what is asked for. ``partitioners`` asks one planner: ``search``, from what ``starts`` offers, for terapipe's
own; ``ladder``, by what ``wishes`` makes of a request, for a paper's; ``bidirectional`` for Chimera. ``joint`` is
``planner="auto"``: ``singles`` asks every planner once, then it searches on, and ``bounds`` tell what cannot win. All hold their
candidates against each other by ``judge``, which builds and simulates the program that the engine would run, and counts its
bytes. ``own_program`` is for a program that the user wrote, ``deadline`` for a ``time_limit_s``.
"""
