"""Check of notebook 06: the row and the column of a rank in the grid."""


def check_06_1(groups):
    for world_size, replicas in ((4, 2), (6, 2), (6, 3), (8, 2), (3, 1)):
        stages = world_size // replicas
        for rank in range(world_size):
            where = f"Rank {rank} of {world_size}, {replicas} replicas:"
            pipeline, same_stage = (sorted(group) for group in groups(rank, world_size, replicas))
            assert rank in pipeline and rank in same_stage, f"{where} it is missing in one of its own groups."
            first = rank - rank % stages
            assert pipeline == list(range(first, first + stages)), f"{where} {pipeline} is no row of the grid."
            column = list(range(rank % stages, world_size, stages))
            assert same_stage == column, f"{where} {same_stage} is no column of the grid."
