//! The machine under a reactor: its clock, its cores, and what the kernel reports.
//!
//! [`Events`] is one core's ring to the kernel: file I/O that owns its buffers, readiness of
//! descriptors, wake-ups from other cores, and sleep. It is an io_uring where that is allowed and
//! epoll where it is not. [`clock`] is the time-stamp counter in nanoseconds; [`CpuSet`] names cores.
//!
//! A thread without a reactor does I/O through [`Aio`] or [`Uring`], rings that own the requests which the
//! kernel works on. [`PerfEvent`] counts what a processor does, [`ThreadUsage`] what a thread is charged.
//!
//! ```
//! let events = sys::Events::new(&sys::Config::default()).expect("an io_uring or an epoll instance");
//! let waker = events.waker();
//! std::thread::spawn(move || waker.wake_always());
//! events.wait(None); // returns because of the wake-up
//! ```
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod aio;
pub mod barrier;
pub mod clock;
mod cpu;
pub mod device;
mod events;
mod file;
mod perf;
mod requests;
mod sqe;
mod thread;
mod uring;

pub use aio::Aio;
pub use cpu::{CpuSet, CpuSetError, pin_to, thread_cpu_ns};
pub use events::{
    Client, Config, Done, Engine, Events, FileId, Interest, Operation, Refused, Waker, Watch, Write,
};
pub use file::replace_file;
pub use perf::{Instructions, PerfConfig, PerfCount, PerfEvent, PerfKind, PerfTarget, Samples};
pub use requests::RingFile;
pub use thread::{ThreadUsage, set_io_priority};
pub use uring::{Commands, Dialect, Polling, Transfers, Uring, UringConfig};
