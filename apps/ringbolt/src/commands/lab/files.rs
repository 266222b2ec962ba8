//! Where the lab's commands read from and write to.

use std::io::Write as _;
use std::path::Path;

use crate::command_error::CommandError;

/// Why a path is no run directory, if it is none.
pub(crate) fn absent(directory: &Path) -> Option<String> {
    let shown = directory.display();
    if !directory.exists() {
        return Some(format!("{shown}: no such directory; `ringbolt lab run` makes one"));
    }
    if !directory.is_dir() {
        return Some(format!("{shown}: not a directory; it is to be what `ringbolt lab run` made"));
    }
    if !directory.join("plan.toml").exists() {
        return Some(format!("{shown}: no plan.toml in it, so no run of the lab"));
    }
    None
}

/// To a file, or to standard output. A pipe that nobody reads any more is no failure.
pub(crate) fn write(output: Option<&Path>, text: &str) -> Result<(), CommandError> {
    match output {
        Some(path) => std::fs::write(path, text)
            .map_err(|error| CommandError::operation(format!("{}: {error}", path.display()))),
        None => match std::io::stdout().write_all(text.as_bytes()) {
            Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
                Err(CommandError::operation(error))
            }
            _ => Ok(()),
        },
    }
}
