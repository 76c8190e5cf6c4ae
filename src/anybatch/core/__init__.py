"""The engine: what a batch is, how it is cut, planned, run and summed; `Accumulator` and `Update`."""

from anybatch.core.accumulated import Accumulated
from anybatch.core.accumulator import Accumulator
from anybatch.core.agreement import has_rows
from anybatch.core.aside import kept_aside, pieces_of
from anybatch.core.autograd_graph import leaves_of, nodes_named, places_behind
from anybatch.core.batch import (
    join_rows,
    move,
    num_rows,
    rows,
    rows_first,
    rows_in_dim,
    rows_to_cut,
    sent,
    take,
    take_rows,
)
from anybatch.core.belonging import Groups, Stacked, groups_of
from anybatch.core.buffers import MovingBuffers
from anybatch.core.collating import collated, samples_of
from anybatch.core.criteria import supervised
from anybatch.core.device_memory import free_on_device, has_counters, with_peak
from anybatch.core.disk import TensorFile
from anybatch.core.display import called, short
from anybatch.core.events import Event, Forward, Load, Loss, Observer, Retry, Zero
from anybatch.core.forward_pass import ForwardPass
from anybatch.core.grouping import Windows, windows
from anybatch.core.hooks import NOTHING, PassHook, around
from anybatch.core.host_memory import free_on_host
from anybatch.core.learner import autocast_context, common_device
from anybatch.core.loss_units import (
    FUNCTIONAL_RULES,
    Rule,
    class_units,
    element_units,
    kl_units,
    row_units,
    weighted_element_units,
)
from anybatch.core.low_precision import LOW_PRECISION, at_least_fp32, is_low
from anybatch.core.metrics import Mean, Metric, Metrics, Number, PerRow, Sum, combine, detached, on_host
from anybatch.core.micro_batch_option import MicroBatch, as_split
from anybatch.core.micro_batches import (
    Cut,
    Dealt,
    Learn,
    MicroBatches,
    Split,
    Workload,
    in_arrival_order,
    is_in_arrival_order,
)
from anybatch.core.nearest_name import did_you_mean, one_of
from anybatch.core.nesting import Batch, NamedPart, children, is_array, leaves, map_leaves, map_tensors, tensors
from anybatch.core.norm_and_clip import gradient_norm
from anybatch.core.notebook_html import facts_table, html_block, html_table, sentences
from anybatch.core.objective import (
    Coupled,
    Objective,
    SeenLoss,
    TermLosses,
    Units,
    checked_loss,
    count_terms,
    count_units,
    loss_and_metrics,
    numbers_of,
    part_loss,
)
from anybatch.core.option_types import Autocast, BatchNorm, Offload, OnNonFinite, Reduction, Sums
from anybatch.core.options import Running
from anybatch.core.out_of_memory import free_bytes, free_memory, is_out_of_memory, once_more
from anybatch.core.parallelism import ALONE, Engine, Needs, Sync
from anybatch.core.parameter_hooks import check_hooks
from anybatch.core.plan import BatchPlan, Layout
from anybatch.core.precision import takes_fp32_gradients
from anybatch.core.python_random import OuterRandom, outer_random
from anybatch.core.ranks import ONE_PROCESS, Ranks
from anybatch.core.readings import SampleList, per_row_lists
from anybatch.core.releases import demand
from anybatch.core.representations import in_own_order, leaf, no_rows, roots_of, share_out
from anybatch.core.result import PENDING, FirstLook, UpdateResult
from anybatch.core.shares import shares_of, weighted_sum
from anybatch.core.shrinking import smaller
from anybatch.core.sizes import parse_bytes, show_bytes
from anybatch.core.snapshot import Snapshot, tables_of
from anybatch.core.splits import Rows, near_equal
from anybatch.core.telling import SILENT, events_for
from anybatch.core.tools import Outcome, Part, Tools, part_of
from anybatch.core.torch_private import (
    COPY_ELSEWHERE,
    SAVED,
    BatchNormLayer,
    DropoutLayer,
    FakeTensor,
    FakeTensorMode,
    InstanceNormLayer,
    NormLayer,
    SpectralNormWeight,
    StorageWeakRef,
    TorchDispatchMode,
    buffers_of,
    call_hooks_of,
    children_of,
    dispatch_modes,
    forget_fake_results,
    function_modes,
    gradient_hooks_of,
    inside_compiled,
    is_compiled_in_place,
    is_dynamo_loaded,
    is_in_backward,
    is_sharded,
    num_writes,
    op_name,
    outputs_of,
    own_part,
    pre_hooks_of,
    profiler_events,
    read_layout,
    storage_behind,
    storage_key,
    without_dynamo,
    without_op_names,
)
from anybatch.core.torch_random import random_state
from anybatch.core.two_passes import loss_of_all
from anybatch.core.update import Update
from anybatch.core.window import Window
