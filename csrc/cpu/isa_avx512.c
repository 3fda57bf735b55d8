typedef int tp_nothing_here_yet;
