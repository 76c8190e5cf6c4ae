""""""

from anybatch.dropout.keyed_dropout import Masks, count_update, masks_of, row_dropout, rows_running
from anybatch.dropout.row_numbering import number_rows
