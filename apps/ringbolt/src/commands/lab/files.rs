//! Run directories and output files of the lab's commands.

use std::path::Path;

use crate::command_error::CommandError;
use crate::console;

/// Why a path is no run directory; `None` if it is one.
pub(crate) fn why_not_a_run(directory: &Path) -> Option<String> {
    let shown = directory.display();
    if !directory.exists() {
        return Some(format!("{shown}: no such directory; `ringbolt lab run` creates one"));
    }
    if !directory.is_dir() {
        return Some(format!("{shown}: not a directory; give the one that `ringbolt lab run` created"));
    }
    if !directory.join("plan.toml").exists() {
        return Some(format!("{shown}: no plan.toml in it: not a run of the lab"));
    }
    None
}

/// Writes to a file, or to standard output; a closed pipe is no error.
pub(crate) fn write_output(output: Option<&Path>, text: &str) -> Result<(), CommandError> {
    match output {
        Some(path) => std::fs::write(path, text)
            .map_err(|error| CommandError::operation(format!("{}: {error}", path.display()))),
        None => {
            console::print(text);
            Ok(())
        }
    }
}
