//! Taking functions from the kernel's drivers and giving them back, without taking a disk that is in use.
//!
//! [`Snapshot::read`] looks at the machine, [`plan`] decides from the snapshot alone, [`apply`] carries the
//! plan out with a [`Journal`] from which [`plan_undo`] finds the way back. All of them see the machine
//! through [`Machine`].
//!
//! ```no_run
//! use pci::bind::{Host, JOURNAL, Request, Snapshot, apply, plan};
//! let host = Host::default();
//! let request = Request { addresses: vec!["0000:00:04.0".parse()?], ..Request::default() };
//! let plan = plan(&Snapshot::read(&host, &request.addresses), &request);
//! for refusal in &plan.refusals {
//!     refusal.reasons.iter().for_each(|reason| println!("{}: {reason}", refusal.address));
//! }
//! apply(&host, JOURNAL, &plan, &mut |_, effect| println!("{effect}"))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod apply;
mod blocks;
mod journal;
mod machine;
mod plan;
mod signature;
mod snapshot;
mod usage;

pub use apply::{ApplyError, apply};
pub use journal::{JOURNAL, Journal, JournalError};
pub use machine::{Claim, Host, Machine};
pub use plan::{Change, Driver, Plan, Refusal, Request, Step, plan, plan_undo, steps};
pub use signature::{Extract, HEAD_BYTES, Kind, Signature, TAIL_BYTES, recognise};
pub use snapshot::{Binding, Candidate, Snapshot};
pub use usage::Reason;

#[cfg(test)]
mod tests;
