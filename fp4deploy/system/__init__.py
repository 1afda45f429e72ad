"""What fp4deploy asks of the operating system: files, child processes and the terminal, each handled once.

`files` writes what is whole or absent; `schema` reads what anyone may have written. `children` starts programs that end
with this process, through `supervisor`, from folders that `search_path` allows. `terminal` and `progress` print.
`usage_reports` and `offline` say what libraries may not send and fetch; `onnx_runtime` imports one that would. These
modules do not import torch: the command line starts with them, and has to answer at once.
"""
