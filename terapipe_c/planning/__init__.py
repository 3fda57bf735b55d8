"""How ``tp.plan`` finds a plan, in the order in which a request passes through.

``entrance`` has ``tp.plan``. ``request`` checks the arguments. ``partitioners`` asks one planner: terapipe's own ``search``, which
begins at ``starts``; a paper's along a ``ladder`` of memory limits, with the request translated by ``wishes``; or ``bidirectional``
for Chimera. ``joint`` is ``planner="auto"``: ``singles`` asks every planner once, then it searches further, leaving out what
``bounds`` exclude. All of them compare candidates by the ``judge``, which builds and simulates the program that the engine would
run and counts its bytes.
``own_program`` is for a program that the user wrote, ``deadline`` for ``time_limit_s``. """
