//! Events that the processor and the kernel count: `perf_event_open(2)`.
//!
//! A [`PerfEvent`] counts one thing of one thread, process or processor; with a frequency it also notes,
//! so many times a second, where that was, in [`Samples`] that are read without a system call.
//! [`Instructions`] is the one that a thread asks about itself.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

mod samples;

pub use samples::Samples;

/// `struct perf_event_attr`, as of the fifth version of it (112 bytes), which every kernel since 4.1 takes.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    /// Period, or frequency where the flag says so.
    sample: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup: u32,
    breakpoint: u32,
    config1: u64,
    config2: u64,
    branches: u64,
    registers_user: u64,
    stack_user: u32,
    clock: i32,
    registers_interrupt: u64,
    aux_watermark: u32,
    stack_max: u16,
    reserved: u16,
}

const _: () = assert!(size_of::<Attributes>() == 112);

const DISABLED: u64 = 1;
const INHERIT: u64 = 1 << 1;
const EXCLUDE_KERNEL: u64 = 1 << 5;
const EXCLUDE_HYPERVISOR: u64 = 1 << 6;
const FREQUENCY: u64 = 1 << 10;
const CLOSE_ON_EXEC: libc::c_ulong = 1 << 3;
/// `PERF_FORMAT_TOTAL_TIME_ENABLED | PERF_FORMAT_TOTAL_TIME_RUNNING`.
const WITH_TIMES: u64 = 3;
/// `PERF_SAMPLE_IP | PERF_SAMPLE_TID | PERF_SAMPLE_CALLCHAIN`.
const WITH_CHAIN: u64 = 1 | 1 << 1 | 1 << 5;
/// `_IO('$', 0)` and `_IO('$', 1)`.
const ENABLE: libc::Ioctl = 0x2400;
const DISABLE: libc::Ioctl = 0x2401;

/// What is counted, as the kernel numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PerfKind {
    /// By the processor: 0 cycles, 1 instructions, 2 references to the last level of cache, 3 misses of it.
    Hardware(u64),
    /// By the kernel: 0 its clock, 1 time on a processor, 3 context switches, 4 migrations.
    Software(u64),
}

/// Whose events are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PerfTarget {
    /// The calling thread's.
    ThisThread,
    /// A process's, and those of all that it starts from now on.
    Tree(u32),
    /// A processor's, whoever runs on it.
    Cpu(u32),
}

/// How an event is counted.
#[derive(Clone, Copy, Debug)]
pub struct PerfConfig {
    /// What.
    pub kind: PerfKind,
    /// Whose.
    pub target: PerfTarget,
    /// Whether what the kernel and a hypervisor do is left out.
    pub user_only: bool,
    /// Samples a second, 0 for none. An event with samples waits to be [switched](PerfEvent::switch) on.
    pub frequency_hz: u64,
}

/// One event that is counted from now on.
#[derive(Debug)]
pub struct PerfEvent(OwnedFd);

/// A reading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PerfCount {
    /// As counted.
    pub raw: u64,
    /// Nanoseconds that it was switched on.
    pub enabled_ns: u64,
    /// Nanoseconds of these that it counted: fewer where events had to take turns.
    pub running_ns: u64,
}

impl PerfEvent {
    /// Opens an event; in the group of `leader`, where there is one, so that both count at the same times.
    ///
    /// # Errors
    /// What the kernel says: `ENOENT` or `EOPNOTSUPP` for an event that this machine does not count, `EACCES`
    /// or `EPERM` where it may not be asked (`kernel.perf_event_paranoid`), `ESRCH` for a process that is
    /// not there.
    pub fn open(config: &PerfConfig, leader: Option<&PerfEvent>) -> io::Result<PerfEvent> {
        let (kind, number) = match config.kind {
            PerfKind::Hardware(number) => (0, number),
            PerfKind::Software(number) => (1, number),
        };
        let nothing_such = |_| io::Error::from_raw_os_error(libc::ESRCH);
        let (process, cpu, inherit) = match config.target {
            PerfTarget::ThisThread => (0, -1, 0),
            PerfTarget::Tree(process) => (libc::pid_t::try_from(process).map_err(nothing_such)?, -1, INHERIT),
            PerfTarget::Cpu(cpu) => (-1, libc::c_int::try_from(cpu).map_err(nothing_such)?, 0),
        };
        let user_only = if config.user_only { EXCLUDE_KERNEL | EXCLUDE_HYPERVISOR } else { 0 };
        let samples = config.frequency_hz > 0;
        let attributes = Attributes {
            kind,
            size: size_of::<Attributes>() as u32,
            config: number,
            sample: config.frequency_hz,
            sample_type: if samples { WITH_CHAIN } else { 0 },
            read_format: WITH_TIMES,
            flags: inherit | user_only | if samples { DISABLED | FREQUENCY } else { 0 },
            ..Attributes::default()
        };
        let group = leader.map_or(-1, |leader| leader.0.as_raw_fd());
        // SAFETY: the structure lives across the call, and its size is in it; the kernel reads that much.
        let number = unsafe {
            libc::syscall(
                libc::SYS_perf_event_open,
                &raw const attributes,
                process,
                cpu,
                group,
                CLOSE_ON_EXEC,
            )
        };
        if number < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just given this number out, and nobody else has it.
        Ok(PerfEvent(unsafe { OwnedFd::from_raw_fd(number as i32) }))
    }

    /// Switches it on or off.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn switch(&self, on: bool) -> io::Result<()> {
        // SAFETY: the request takes no pointer.
        let status = unsafe { libc::ioctl(self.0.as_raw_fd(), if on { ENABLE } else { DISABLE }, 0) };
        if status < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// What was counted until now; a system call.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn read(&self) -> io::Result<PerfCount> {
        let mut bytes = [0; 24];
        let length = rustix::io::read(&self.0, &mut bytes)?;
        if length != bytes.len() {
            return Err(io::Error::other(format!("{length} bytes of a counter, not {}", bytes.len())));
        }
        let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|i| bytes[at + i]));
        Ok(PerfCount { raw: word(0), enabled_ns: word(8), running_ns: word(16) })
    }
}

/// A counter of the instructions that the calling thread executes in user mode.
///
/// Reading it is a system call, some hundred nanoseconds: it is for measurements, not to be left on.
#[derive(Debug)]
pub struct Instructions(PerfEvent);

impl Instructions {
    /// Starts counting what this thread executes.
    ///
    /// # Errors
    /// Machines without such a counter, which many virtual machines are, and settings of
    /// `kernel.perf_event_paranoid` above 2.
    pub fn of_this_thread() -> io::Result<Instructions> {
        let config = PerfConfig {
            kind: PerfKind::Hardware(1),
            target: PerfTarget::ThisThread,
            user_only: true,
            frequency_hz: 0,
        };
        PerfEvent::open(&config, None).map(Instructions)
    }

    /// Instructions since it was made; 0 if the kernel does not say.
    pub fn count(&self) -> u64 {
        self.0.read().map_or(0, |count| count.raw)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri counts nothing")]
    fn counting_works_or_says_why_not() {
        match Instructions::of_this_thread() {
            Ok(counter) => {
                let before = counter.count();
                std::hint::black_box((0..1000u64).map(std::hint::black_box).sum::<u64>());
                assert!(counter.count() - before > 1000);
            }
            Err(error) => {
                println!("SKIPPED: no instruction counter here: {error}");
                assert!(error.raw_os_error().is_some());
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri counts nothing")]
    fn samples_say_where_this_processor_was() {
        let cpu = rustix::thread::sched_getcpu() as u32;
        crate::pin_to(cpu).unwrap();
        let config = PerfConfig {
            kind: PerfKind::Software(0),
            target: PerfTarget::Cpu(cpu),
            user_only: false,
            frequency_hz: 997,
        };
        let event = match PerfEvent::open(&config, None) {
            Ok(event) => event,
            Err(error) => return println!("SKIPPED: sampling is not allowed here: {error}"),
        };
        let mut samples = Samples::of(event, 8).unwrap();
        let count = |samples: &mut Samples| {
            let mut records = 0;
            samples.drain(&mut |record| {
                assert!(record.len() >= 8 && record.len() % 8 == 0, "{record:?}");
                records += 1;
            });
            records
        };
        assert_eq!(count(&mut samples), 0, "it starts switched off");
        samples.event().switch(true).unwrap();
        let began = std::time::Instant::now();
        let mut seen = 0;
        // Far more samples than the ring has room for come by, so that records wrap around in it.
        while seen < 400 && began.elapsed().as_secs() < 20 {
            std::hint::black_box((0..100_000u64).map(std::hint::black_box).sum::<u64>());
            seen += count(&mut samples);
        }
        assert!(seen >= 400, "{seen} samples in {:?}", began.elapsed());
    }
}
