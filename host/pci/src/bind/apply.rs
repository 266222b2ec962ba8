//! Execution of a plan, so that it can be undone from any point.
//!
//! Before the first change of a function, the journal records its binding durably. An undo is planned from
//! the current state, not from a log of changes, so that it works wherever a run was interrupted.

use std::io;

use crate::PciAddress;
use crate::bind::host_system::{DeviceClaim, HostSystem};
use crate::bind::journal::{BindJournal, BindJournalError, can_be_recorded};
use crate::bind::plan::{BindPlan, BindStep, BindingChange, steps};
use crate::bind::snapshot::{Binding, HUGEPAGES, binding, exists, read_hugepages};

/// Why a plan was not applied completely.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The journal cannot be used; nothing was changed since its last successful write.
    #[error("{0}")]
    Journal(#[from] BindJournalError),
    /// The system has changed since the snapshot.
    #[error("{address}: {what} changed since it was inspected; nothing was done to it")]
    Changed {
        /// The function.
        address: PciAddress,
        /// What has changed.
        what: String,
    },
    /// A step failed.
    #[error(
        "{address}: {step}: {error}; {}",
        if *restored { "its original binding is restored" } else { "`ringbolt nvme bind --undo` restores its binding" }
    )]
    Step {
        /// The function.
        address: PciAddress,
        /// The step.
        step: String,
        /// The kernel's error.
        error: io::Error,
        /// Whether the original binding was restored.
        restored: bool,
    },
    /// The kernel allocated fewer hugepages.
    #[error("hugepages: {wanted} of 2 MiB were requested, but the kernel had memory for only {had}")]
    Hugepages {
        /// The requested number.
        wanted: u64,
        /// The number of hugepages now.
        had: u64,
    },
}

/// Applies a plan. Calls `report` before each step.
///
/// If the change of a function fails, its original binding is restored, and the functions after it are not changed;
/// those before it stay changed.
pub fn apply(
    machine: &dyn HostSystem,
    journal_path: &str,
    plan: &BindPlan,
    report: &mut dyn FnMut(Option<PciAddress>, &str),
) -> Result<(), ApplyError> {
    let mut journal = BindJournal::load(machine, journal_path)?;
    let done = apply_with(machine, journal_path, &mut journal, plan, report);
    // Remove what has its original state again.
    journal
        .functions
        .retain(|address, before| exists(machine, *address) && binding(machine, *address) != *before);
    if journal.hugepages.is_some_and(|(before, _)| read_hugepages(machine) == Some(before)) {
        journal.hugepages = None;
    }
    let stored = journal.store(machine, journal_path);
    done.and(stored.map_err(ApplyError::from))
}

fn apply_with(
    machine: &dyn HostSystem,
    journal_path: &str,
    journal: &mut BindJournal,
    plan: &BindPlan,
    report: &mut dyn FnMut(Option<PciAddress>, &str),
) -> Result<(), ApplyError> {
    if let Some((now, wanted)) = plan.hugepages {
        // Any number between the two is our change, also if the kernel allocated fewer than requested.
        let (before, highest) = journal.hugepages.unwrap_or((now, now));
        journal.hugepages = Some((before, highest.max(wanted)));
        journal.store(machine, journal_path)?;
        report(None, &format!("hugepages of 2 MiB: {now} -> {wanted}"));
        set_hugepages(machine, wanted)?;
    }
    for change in &plan.changes {
        apply_one(machine, journal_path, journal, change, report)?;
    }
    Ok(())
}

fn set_hugepages(machine: &dyn HostSystem, wanted: u64) -> Result<(), ApplyError> {
    // The kernel allocates what it can without an error, so read the number back.
    let written = machine.write(HUGEPAGES, &wanted.to_string());
    match read_hugepages(machine) {
        Some(had) if had == wanted && written.is_ok() => Ok(()),
        had => Err(ApplyError::Hugepages { wanted, had: had.unwrap_or(0) }),
    }
}

fn apply_one(
    machine: &dyn HostSystem,
    journal_path: &str,
    journal: &mut BindJournal,
    change: &BindingChange,
    report: &mut dyn FnMut(Option<PciAddress>, &str),
) -> Result<(), ApplyError> {
    let address = change.address;
    let changed = |what: &str| ApplyError::Changed { address, what: what.to_string() };
    if binding(machine, address) != change.from {
        return Err(changed("its driver"));
    }
    if !can_be_recorded(&change.from) {
        return Err(changed("the name of its driver"));
    }
    // Until the unbind, its disks cannot be mounted, used for swap or added to another block device.
    let claimed: io::Result<Vec<DeviceClaim>> =
        change.claims.iter().map(|node| machine.claim(node)).collect();
    let mut claims = claimed.map_err(|error| changed(&format!("the use of its disks ({error})")))?;
    journal.functions.entry(address).or_insert_with(|| change.from.clone());
    journal.store(machine, journal_path)?;
    for step in steps(&change.from, &change.to) {
        report(Some(address), &step.to_string());
        let done = perform(machine, address, &step);
        if let BindStep::Unbind(_) = step {
            claims.clear();
        }
        if let Err(error) = done {
            // Do not claim its disks again: the roll-back only binds the function to its original driver.
            let now = binding(machine, address);
            let rolled_back =
                steps(&now, &change.from).iter().all(|step| perform(machine, address, step).is_ok());
            let restored = rolled_back && binding(machine, address) == change.from;
            return Err(ApplyError::Step { address, step: step.to_string(), error, restored });
        }
    }
    Ok(())
}

/// Executes a step and verifies its effect.
fn perform(machine: &dyn HostSystem, address: PciAddress, step: &BindStep) -> io::Result<()> {
    let text = address.to_string();
    match step {
        BindStep::SetOverride(only) => {
            let path = format!("sys/bus/pci/devices/{address}/driver_override");
            // An empty line clears the override.
            machine.write(&path, &format!("{}\n", only.as_deref().unwrap_or_default()))?;
        }
        BindStep::Unbind(driver) => machine.write(&format!("sys/bus/pci/drivers/{driver}/unbind"), &text)?,
        BindStep::Bind(driver) => machine.write(&format!("sys/bus/pci/drivers/{driver}/bind"), &text)?,
    }
    let Binding { driver, driver_override: only } = binding(machine, address);
    let effective = match step {
        BindStep::SetOverride(wanted) => only == *wanted,
        BindStep::Unbind(_) => driver.is_none(),
        BindStep::Bind(wanted) => driver.as_ref() == Some(wanted),
    };
    match effective {
        true => Ok(()),
        false => Err(io::Error::other("the kernel accepted the write without effect; see dmesg")),
    }
}
