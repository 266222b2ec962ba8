//! Sets schedulers for a cell, and verifies that settings do not change while it is measured.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::devices::Device;
use crate::host::HostInfo;
use crate::journal::Journal;
use crate::queue_settings::{QueueSettings, RestoreError, read_setting};

/// Sets schedulers, always with their defaults.
#[derive(Debug, Default)]
pub(crate) struct SchedulerSetter {
    /// Defaults of a scheduler by `queue` directory and name, read after the first switch to it.
    defaults: BTreeMap<(PathBuf, String), QueueSettings>,
}

impl SchedulerSetter {
    /// Switches a device to a scheduler with its default settings, whatever the user or the previous cell had set.
    ///
    /// # Errors
    /// File and error, in one line.
    pub(crate) fn switch_to(
        &mut self,
        queue: &Path,
        scheduler: &str,
        journal: &mut Journal,
    ) -> Result<(), String> {
        let file = queue.join("scheduler");
        let failed = |error| format!("{}: {error}", file.display());
        // Settings may change even if the scheduler does not.
        journal.record_queue(queue).map_err(failed)?;
        let key = (queue.to_path_buf(), scheduler.to_string());
        if let Some(defaults) = self.defaults.get(&key) {
            return match defaults.restore(queue).into_iter().next() {
                None => Ok(()),
                Some(RestoreError::Retryable(why) | RestoreError::Permanent(why)) => Err(why),
            };
        }
        if scheduler != "none" && read_setting(&file).is_ok_and(|now| now == scheduler) {
            // Only a switch resets the settings.
            journal.set(&file, "none").map_err(failed)?;
        }
        journal.set(&file, scheduler).map_err(failed)?;
        self.defaults.insert(key, QueueSettings::read(queue));
        Ok(())
    }
}

/// The settings that must not change while a cell is measured.
#[derive(Debug)]
pub(crate) struct SettingsSnapshot {
    queues: Vec<(PathBuf, QueueSettings)>,
    /// Other settings that the run has changed, such as the frequency governor, and the values that it wrote.
    settings: Vec<(PathBuf, String)>,
}

impl SettingsSnapshot {
    /// Reads the schedulers of these devices, and the settings that the run has changed.
    pub(crate) fn read(host: &HostInfo, devices: &[Device], journal: &Journal) -> SettingsSnapshot {
        let queues = devices.iter().filter_map(|device| {
            let queue = host.path(&format!("sys/block/{}/queue", device.name.as_ref()?));
            let state = QueueSettings::read(&queue);
            Some((queue, state))
        });
        let settings = journal.settings().map(|(path, value)| (path.to_path_buf(), value.to_string()));
        SettingsSnapshot { queues: queues.collect(), settings: settings.collect() }
    }

    /// What has changed since: each file with the expected and the found value.
    pub(crate) fn changes(&self) -> Vec<String> {
        let queues = self.queues.iter();
        let mut changes: Vec<String> =
            queues.flat_map(|(queue, state)| state.differences(queue, &QueueSettings::read(queue))).collect();
        for (path, expected) in &self.settings {
            let found = read_setting(path).unwrap_or_else(|error| error.to_string());
            if found != *expected {
                changes.push(format!("{}: expected {expected}, found {found}", path.display()));
            }
        }
        changes
    }
}
