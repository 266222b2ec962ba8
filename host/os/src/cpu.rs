//! Sets of CPU cores, and thread affinity.

use std::fmt;
use std::str::FromStr;

use rustix::thread::{sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};

/// A non-empty set of cores, in ascending order.
///
/// The text form is a list (`0-3,5`), as a mask (`0x2f`) or as SPDK's bracketed list (`[0-3,5]`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuSet(Vec<u32>);

/// Why a core list is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CpuSetError {
    /// The text is neither a list nor a mask.
    #[error("'{0}' is not a list of cores; write 0-3,5 or 0x2f")]
    Syntax(String),
    /// The list or mask is empty.
    #[error("no cores are named")]
    Empty,
    /// The affinity of this process (second field) does not include the core.
    #[error("core {0} is not among the cores of this process ({1})")]
    NotAllowed(u32, String),
}

const CPU_INDEX_MAX: u32 = 1023;

impl CpuSet {
    /// The cores that this process may run on.
    pub fn allowed() -> CpuSet {
        let set = sched_getaffinity(None);
        let cpus = match set {
            Ok(set) => (0..=CPU_INDEX_MAX).filter(|cpu| set.is_set(*cpu as usize)).collect(),
            Err(_) => vec![0],
        };
        CpuSet(cpus)
    }

    /// A set of the given cores; duplicates are removed.
    pub fn new(mut cpus: Vec<u32>) -> Result<CpuSet, CpuSetError> {
        cpus.sort_unstable();
        cpus.dedup();
        if cpus.is_empty() { Err(CpuSetError::Empty) } else { Ok(CpuSet(cpus)) }
    }

    /// Returns the set if the process may run on all of its cores.
    pub fn checked(self) -> Result<CpuSet, CpuSetError> {
        let allowed = CpuSet::allowed();
        match self.0.iter().find(|cpu| !allowed.0.contains(cpu)) {
            Some(cpu) => Err(CpuSetError::NotAllowed(*cpu, allowed.to_string())),
            None => Ok(self),
        }
    }

    /// The cores, ascending.
    pub fn cpus(&self) -> &[u32] {
        &self.0
    }
}

impl CpuSet {
    /// A set as SPDK's methods name it: a hexadecimal mask, with or without `0x`, or a list in brackets.
    pub fn from_mask(text: &str) -> Result<CpuSet, CpuSetError> {
        let trimmed = text.trim();
        if trimmed.starts_with('[') {
            return trimmed.parse();
        }
        let digits = trimmed.strip_prefix("0x").or(trimmed.strip_prefix("0X")).unwrap_or(trimmed);
        let parsed: Result<CpuSet, CpuSetError> = format!("0x{digits}").parse();
        parsed.map_err(|error| match error {
            CpuSetError::Syntax(_) => CpuSetError::Syntax(text.to_string()),
            error => error,
        })
    }
}

impl FromStr for CpuSet {
    type Err = CpuSetError;

    fn from_str(text: &str) -> Result<CpuSet, CpuSetError> {
        let syntax = || CpuSetError::Syntax(text.to_string());
        let trimmed = text.trim().trim_start_matches('[').trim_end_matches(']');
        let mut cpus = Vec::new();
        if let Some(mask) = trimmed.strip_prefix("0x") {
            let mask = u128::from_str_radix(mask, 16).map_err(|_| syntax())?;
            cpus.extend((0..128).filter(|cpu| mask >> cpu & 1 == 1));
            return CpuSet::new(cpus);
        }
        for part in trimmed.split(',').filter(|part| !part.trim().is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let first: u32 = first.trim().parse().map_err(|_| syntax())?;
            let last: u32 = last.trim().parse().map_err(|_| syntax())?;
            if first > last || last > CPU_INDEX_MAX {
                return Err(syntax());
            }
            cpus.extend(first..=last);
        }
        CpuSet::new(cpus)
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0.as_slice();
        let mut separator = "";
        while let Some(first) = rest.first() {
            let run = (0..rest.len()).take_while(|ahead| rest[*ahead] == first + *ahead as u32).count();
            write!(f, "{separator}{first}")?;
            if run > 1 {
                write!(f, "-{}", rest[run - 1])?;
            }
            rest = &rest[run..];
            separator = ",";
        }
        Ok(())
    }
}

/// Pins the calling thread to one core.
pub fn pin_thread_to(cpu: u32) -> std::io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu as usize);
    Ok(sched_setaffinity(None, &set)?)
}

/// A thread of this process, for [`set_thread_cpus`]. It must be alive then: the kernel gives its number to
/// another one later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadId(rustix::thread::Pid);

impl ThreadId {
    /// The calling thread.
    pub fn current() -> ThreadId {
        ThreadId(rustix::thread::gettid())
    }
}

/// Restricts a thread to these cores. The kernel moves it if it runs on another one, and if it sleeps, wakes
/// it on one of them.
pub fn set_thread_cpus(thread: ThreadId, cpus: &[u32]) -> std::io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu as usize));
    Ok(sched_setaffinity(Some(thread.0), &set)?)
}

/// CPU time of the calling thread, in nanoseconds.
pub fn thread_cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_masks_and_brackets_parse_to_the_same_set() {
        for text in ["0-3,5", "0x2f", "[0-3,5]", "5,3,2,1,0,0", " 0 - 3 , 5 "] {
            assert_eq!(text.parse::<CpuSet>().unwrap().to_string(), "0-3,5", "{text}");
        }
    }

    #[test]
    fn masks_of_methods_are_hexadecimal_with_or_without_a_prefix() {
        for text in ["0x2f", "2f", " 2F ", "0X2f", "[0-3,5]"] {
            assert_eq!(CpuSet::from_mask(text).unwrap().to_string(), "0-3,5", "{text}");
        }
        assert_eq!(CpuSet::from_mask("10").unwrap().to_string(), "4");
        assert_eq!(CpuSet::from_mask("1-3"), Err(CpuSetError::Syntax("1-3".into())));
        assert_eq!(CpuSet::from_mask("0"), Err(CpuSetError::Empty));
    }

    #[test]
    fn invalid_and_empty_sets_are_rejected() {
        assert_eq!("".parse::<CpuSet>(), Err(CpuSetError::Empty));
        assert_eq!("0x0".parse::<CpuSet>(), Err(CpuSetError::Empty));
        for text in ["3-1", "a", "0x", "0-99999999", "1--2", "0xg"] {
            assert!(matches!(text.parse::<CpuSet>(), Err(CpuSetError::Syntax(_))), "{text}");
        }
        assert!(matches!("1023".parse::<CpuSet>().unwrap().checked(), Err(CpuSetError::NotAllowed(1023, _))));
    }
}
