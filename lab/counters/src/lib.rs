//! What the processor did: events counted, and time attributed to parts of the storage stack.
//!
//! A [`Tree`] counts events of a process and of all that it starts; [`System`] those of the whole
//! machine. A [`Profile`] samples where the processors are and puts each sample into a class by the
//! kernel's symbols ([`Classes`], a data file). Where a machine counts no cycles, as most virtual ones
//! do, [`probe`] says so, and profiles go by time.
//!
//! ```
//! use counters::Classes;
//! let classes = Classes::built_in();
//! assert_eq!(classes.of(&["blk_mq_submit_bio", "io_submit_sqe"], false), "block_layer");
//! assert_eq!(classes.of(&["_raw_spin_lock", "dd_insert_requests"], false), "locks");
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod classes;
mod count;
mod profile;
mod symbols;

pub use classes::Classes;
pub use count::{Count, Event, System, Tree, probe};
pub use profile::{Profile, Shares};
pub use symbols::Symbols;
