GOALS = ()
GROUPS = ()


def refuse_without_card(): ...
