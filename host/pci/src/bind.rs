//! Rebinding of PCI functions between kernel and user space drivers, with protection of disks in use.
//!
//! [`BindSnapshot::read`] reads the state of the system, [`plan`] decides from the snapshot alone, [`apply`]
//! executes the plan and writes a [`BindJournal`], from which [`plan_undo`] plans the way back. All of them
//! access the system through [`HostSystem`].
//!
//! ```no_run
//! use pci::bind::{BindRequest, BindSnapshot, JOURNAL_PATH, LinuxHost, apply, plan};
//! let host = LinuxHost::default();
//! let request = BindRequest { addresses: vec!["0000:00:04.0".parse()?], ..BindRequest::default() };
//! let plan = plan(&BindSnapshot::read(&host, &request.addresses), &request);
//! for refusal in &plan.refusals {
//!     refusal.reasons.iter().for_each(|reason| println!("{}: {reason}", refusal.address));
//! }
//! apply(&host, JOURNAL_PATH, &plan, &mut |_, step| println!("{step}"))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod apply;
mod block_devices;
mod host_system;
mod journal;
mod plan;
mod signature;
mod snapshot;
mod usage;

pub use apply::{ApplyError, apply};
pub use host_system::{DeviceClaim, HostSystem, LinuxHost};
pub use journal::{BindJournal, BindJournalError, JOURNAL_PATH};
pub use plan::{
    BindDriver, BindPlan, BindRefusal, BindRequest, BindStep, BindingChange, plan, plan_undo, steps,
};
pub use signature::{DeviceExtract, HEAD_BYTES, Signature, SignatureKind, TAIL_BYTES, detect_signatures};
pub use snapshot::{BindSnapshot, Binding, Candidate};
pub use usage::{RefusalReason, users_of_block_device};

#[cfg(test)]
mod tests;
