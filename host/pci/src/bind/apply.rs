//! Carrying a plan out, so that it can be taken back from any point.
//!
//! Before the first effect on a function the journal says, durably, what it was bound to. Undoing is
//! planned from what is found then, not from what was done, so that it does not matter where a run
//! ended.

use std::io;

use crate::Address;
use crate::bind::journal::{Journal, JournalError, can_be_noted};
use crate::bind::machine::{Claim, Machine};
use crate::bind::plan::{Change, Plan, Step, steps};
use crate::bind::snapshot::{Binding, HUGEPAGES, binding, exists, read_hugepages};

/// Why a plan was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The journal cannot be used; nothing was done.
    #[error("{0}")]
    Journal(#[from] JournalError),
    /// The machine has changed since the plan was made.
    #[error("{address}: {what} changed since it was looked at; nothing was done to it")]
    Changed {
        /// The function.
        address: Address,
        /// What.
        what: String,
    },
    /// An effect failed.
    #[error(
        "{address}: {step}: {error}; {}",
        if *restored { "it is as it was" } else { "`ringbolt nvme bind --undo` goes back to what was before" }
    )]
    Step {
        /// The function.
        address: Address,
        /// The effect.
        step: String,
        /// What the kernel said.
        error: io::Error,
        /// Whether the function is bound again as it was.
        restored: bool,
    },
    /// Hugepages were not had.
    #[error("hugepages: {wanted} of 2 MiB were asked for and the kernel had memory for {had}")]
    Hugepages {
        /// How many.
        wanted: u64,
        /// How many there are.
        had: u64,
    },
}

/// Carries a plan out. `tell` hears of every effect before it is made.
///
/// A function whose change fails is put back, and those after it are left alone; those before it stay
/// changed.
pub fn apply(
    machine: &dyn Machine,
    journal_path: &str,
    plan: &Plan,
    tell: &mut dyn FnMut(Option<Address>, &str),
) -> Result<(), ApplyError> {
    let mut journal = Journal::load(machine, journal_path)?;
    let done = apply_with(machine, journal_path, &mut journal, plan, tell);
    // What is as it was need not be remembered.
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
    machine: &dyn Machine,
    journal_path: &str,
    journal: &mut Journal,
    plan: &Plan,
    tell: &mut dyn FnMut(Option<Address>, &str),
) -> Result<(), ApplyError> {
    if let Some((now, wanted)) = plan.hugepages {
        // Whatever is found between the two is ours, also if the kernel gave fewer than were asked for.
        let (before, most) = journal.hugepages.unwrap_or((now, now));
        journal.hugepages = Some((before, most.max(wanted)));
        journal.store(machine, journal_path)?;
        tell(None, &format!("hugepages of 2 MiB: {now} -> {wanted}"));
        set_hugepages(machine, wanted)?;
    }
    for change in &plan.changes {
        apply_one(machine, journal_path, journal, change, tell)?;
    }
    Ok(())
}

fn set_hugepages(machine: &dyn Machine, wanted: u64) -> Result<(), ApplyError> {
    // The kernel takes what it can get and reports no failure; reading it back tells.
    let written = machine.write(HUGEPAGES, &wanted.to_string());
    match read_hugepages(machine) {
        Some(had) if had == wanted && written.is_ok() => Ok(()),
        had => Err(ApplyError::Hugepages { wanted, had: had.unwrap_or(0) }),
    }
}

fn apply_one(
    machine: &dyn Machine,
    journal_path: &str,
    journal: &mut Journal,
    change: &Change,
    tell: &mut dyn FnMut(Option<Address>, &str),
) -> Result<(), ApplyError> {
    let address = change.address;
    let changed = |what: &str| ApplyError::Changed { address, what: what.to_string() };
    if binding(machine, address) != change.from {
        return Err(changed("its driver"));
    }
    if !can_be_noted(&change.from) {
        return Err(changed("the name of its driver"));
    }
    // From here until it is unbound nobody mounts its disks, swaps to them or builds on them.
    let claimed: io::Result<Vec<Claim>> = change.claims.iter().map(|node| machine.claim(node)).collect();
    let mut claims = claimed.map_err(|error| changed(&format!("the use of its disks ({error})")))?;
    journal.functions.entry(address).or_insert_with(|| change.from.clone());
    journal.store(machine, journal_path)?;
    for step in steps(&change.from, &change.to) {
        tell(Some(address), &step.to_string());
        let done = perform(machine, address, &step);
        if let Step::Unbind(_) = step {
            claims.clear();
        }
        if let Err(error) = done {
            // Its disks are not claimed again: what is bound to the kernel's driver keeps them there.
            let now = binding(machine, address);
            let back = steps(&now, &change.from).iter().all(|step| perform(machine, address, step).is_ok());
            let restored = back && binding(machine, address) == change.from;
            return Err(ApplyError::Step { address, step: step.to_string(), error, restored });
        }
    }
    Ok(())
}

/// Makes one effect, and looks whether it is there.
fn perform(machine: &dyn Machine, address: Address, step: &Step) -> io::Result<()> {
    let text = address.to_string();
    match step {
        Step::Only(only) => {
            let path = format!("sys/bus/pci/devices/{address}/driver_override");
            // An empty line means any driver.
            machine.write(&path, &format!("{}\n", only.as_deref().unwrap_or_default()))?;
        }
        Step::Unbind(driver) => machine.write(&format!("sys/bus/pci/drivers/{driver}/unbind"), &text)?,
        Step::Bind(driver) => machine.write(&format!("sys/bus/pci/drivers/{driver}/bind"), &text)?,
    }
    let Binding { driver, only } = binding(machine, address);
    let there = match step {
        Step::Only(wanted) => only == *wanted,
        Step::Unbind(_) => driver.is_none(),
        Step::Bind(wanted) => driver.as_ref() == Some(wanted),
    };
    match there {
        true => Ok(()),
        false => Err(io::Error::other("the kernel took the order and did not follow it; dmesg says why")),
    }
}
