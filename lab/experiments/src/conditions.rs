//! The settings under which a cell is measured: set before it, and the same after it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::host::Host;
use crate::journal::Journal;
use crate::queue::{Problem, QueueState, current};
use crate::target::Device;

/// Sets schedulers, each with the settings that it had when the run first switched to it.
#[derive(Debug, Default)]
pub(crate) struct Schedulers {
    /// By `queue` directory and scheduler.
    fresh: BTreeMap<(PathBuf, String), QueueState>,
}

impl Schedulers {
    /// Gives a device a scheduler with its defaults: neither the settings that the user made before the run, nor
    /// those of the cell before.
    ///
    /// # Errors
    /// The file that cannot be set, and why, in one line.
    pub(crate) fn set(&mut self, queue: &Path, scheduler: &str, journal: &mut Journal) -> Result<(), String> {
        let file = queue.join("scheduler");
        let failed = |error| format!("{}: {error}", file.display());
        // Settings change even where the scheduler does not.
        journal.keep_queue(queue).map_err(failed)?;
        let key = (queue.to_path_buf(), scheduler.to_string());
        if let Some(fresh) = self.fresh.get(&key) {
            return match fresh.write_back(queue).into_iter().next() {
                None => Ok(()),
                Some(Problem::Retry(why) | Problem::Lost(why)) => Err(why),
            };
        }
        if scheduler != "none" && current(&file).is_ok_and(|now| now == scheduler) {
            // Only a switch gives it its defaults.
            journal.set(&file, "none").map_err(failed)?;
        }
        journal.set(&file, scheduler).map_err(failed)?;
        self.fresh.insert(key, QueueState::read(queue));
        Ok(())
    }
}

/// What holds before a cell, and must hold after it.
#[derive(Debug)]
pub(crate) struct Conditions {
    queues: Vec<(PathBuf, QueueState)>,
    /// Other settings that the run has changed, as the frequency governor, with the values that it gave them.
    settings: Vec<(PathBuf, String)>,
}

impl Conditions {
    /// Reads the schedulers of these devices, and what the run has changed.
    pub(crate) fn read(host: &Host, devices: &[Device], journal: &Journal) -> Conditions {
        let queues = devices.iter().filter_map(|device| {
            let queue = host.path(&format!("sys/block/{}/queue", device.name.as_ref()?));
            let state = QueueState::read(&queue);
            Some((queue, state))
        });
        let settings = journal.settings().map(|(path, value)| (path.to_path_buf(), value.to_string()));
        Conditions { queues: queues.collect(), settings: settings.collect() }
    }

    /// What is no longer so: each file with the value that was expected and the one that was found.
    pub(crate) fn changes(&self) -> Vec<String> {
        let queues = self.queues.iter();
        let mut changes: Vec<String> =
            queues.flat_map(|(queue, state)| state.differences(queue, &QueueState::read(queue))).collect();
        for (path, expected) in &self.settings {
            let found = current(path).unwrap_or_else(|error| error.to_string());
            if found != *expected {
                changes.push(format!("{}: expected {expected}, found {found}", path.display()));
            }
        }
        changes
    }
}
