//! Operating system interfaces for a reactor: clock, CPU affinity, event loop, asynchronous I/O.
//!
//! [`EventLoop`] is one core's interface to the kernel: file I/O and socket transfers that own their buffers,
//! readiness of descriptors, wake-ups from other cores, and sleep. It uses io_uring where that is allowed and
//! epoll otherwise. [`clock`] converts the time-stamp counter to nanoseconds; [`CpuSet`] is a set of cores.
//!
//! [`AioFile`] carries the operations of one file where io_uring is forbidden, and signals an event loop of
//! either kind. A thread without a reactor does I/O through [`AioQueue`], [`UringQueue`] or [`ThreadQueue`],
//! which own the requests in flight. [`PerfEvent`] is a performance counter, [`ThreadUsage`] the resource
//! usage of a thread, [`KernelKey`] a secret that the kernel keeps.
//!
//! ```
//! let event_loop = os::EventLoop::new(&os::EventLoopConfig::default()).expect("io_uring or epoll");
//! let waker = event_loop.waker();
//! std::thread::spawn(move || waker.wake_always());
//! event_loop.wait(None); // returns because of the wake-up
//! ```
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod aio_file;
mod aio_queue;
pub mod barrier;
pub mod clock;
mod cpu;
mod credentials;
pub mod device;
mod device_zones;
mod drain;
mod event_loop;
mod event_signaler;
mod file;
mod kernel_key;
mod perf;
mod priorities;
mod process;
mod requests;
mod socket_priority;
mod sqe;
mod thread;
mod thread_queue;
mod ublk_control;
mod ublk_queue;
mod uring_queue;
mod vectors;

pub use aio_file::AioFile;
pub use aio_queue::AioQueue;
pub use cpu::{CpuSet, CpuSetError, ThreadId, pin_thread_to, set_thread_cpus, thread_cpu_ns};
pub use credentials::{PeerCredentials, peer_credentials};
pub use device_zones::{DeviceZone, ZoneCondition, report_zones, reset_zone};
pub use event_loop::{
    BufferGroupId, EventBackend, EventClient, EventCompletion, EventLoop, EventLoopConfig, FileId,
    FileOperation, Interest, ReceiveId, RejectedOperation, RejectedSend, SEND_PARTS_MAX, SendEvent, SendPart,
    SocketCapabilities, UblkCommand, Waker, WatchId, WriteMode, send_parts,
};
pub use event_signaler::{EventSignaler, is_eventfd};
pub use file::replace_file;
pub use kernel_key::KernelKey;
pub use perf::{InstructionCounter, PerfConfig, PerfCount, PerfEvent, PerfKind, PerfTarget, SampleRing};
pub use priorities::RequestPriorities;
pub use process::{descriptor_limit, inherited_files, kill_with_parent, raise_descriptor_limit};
pub use requests::BlockFile;
pub use socket_priority::{set_socket_priority, socket_priority};
pub use thread::{MemoryPolicy, ThreadUsage, set_io_priority, set_memory_policy};
pub use thread_queue::ThreadQueue;
pub use ublk_control::{UblkControl, UblkDevice};
pub use ublk_queue::{UblkDataPath, UblkQueueFile};
pub use uring_queue::{FileIo, NvmePassthrough, SqeFormat, UringPolling, UringQueue, UringQueueConfig};
pub use vectors::IO_VECTORS_MAX;
