//! Which reactors serve what a method restricts to some CPUs.

use os::{CpuSet, CpuSetError};
use reactor::ReactorHandle;

/// A `cpumask` does not suit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CpuMaskError {
    /// It is no set of CPUs.
    #[error("cpumask: {0}")]
    Syntax(#[from] CpuSetError),
    /// It has a CPU without a reactor.
    #[error("cpumask: there is no reactor on core {0}")]
    NoReactor(u32),
}

/// The indexes of the reactors on the CPUs of `cpumask`, in SPDK's format; of all without one.
///
/// # Errors
/// It is no mask, or has a CPU without a reactor.
pub fn reactors_of_mask(
    reactors: &[ReactorHandle],
    cpumask: Option<&str>,
) -> Result<Vec<usize>, CpuMaskError> {
    let Some(text) = cpumask else { return Ok(reactors.iter().map(ReactorHandle::index).collect()) };
    let mask = CpuSet::from_mask(text)?;
    let has_reactor = |cpu: &u32| reactors.iter().any(|reactor| reactor.cpu() == *cpu);
    if let Some(cpu) = mask.cpus().iter().find(|cpu| !has_reactor(cpu)) {
        return Err(CpuMaskError::NoReactor(*cpu));
    }
    let selected = reactors.iter().filter(|reactor| mask.cpus().contains(&reactor.cpu()));
    Ok(selected.map(ReactorHandle::index).collect())
}

/// The mask of the CPUs of these reactors, as SPDK's methods return it: `0x3`.
pub fn mask_of_reactors(reactors: &[ReactorHandle], indexes: &[usize]) -> String {
    let cpus = reactors.iter().filter(|reactor| indexes.contains(&reactor.index()));
    let cpus: Vec<u32> = cpus.map(ReactorHandle::cpu).collect();
    mask_of(&cpus)
}

/// A `cpumask` as a mask, whether it is one or a list: `0x3` for `[0,1]`.
///
/// # Errors
/// It is neither.
pub fn canonical_mask(cpumask: &str) -> Result<String, CpuMaskError> {
    Ok(mask_of(CpuSet::from_mask(cpumask)?.cpus()))
}

fn mask_of(cpus: &[u32]) -> String {
    let last = cpus.iter().max().copied().unwrap_or(0);
    let digit = |index: u32| {
        let bit = |bit: u32| u32::from(cpus.contains(&(index * 4 + bit))) << bit;
        char::from_digit((0..4).map(bit).sum(), 16).unwrap_or('0')
    };
    let digits: String = (0..=last / 4).rev().map(digit).collect();
    format!("0x{digits}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_selects_the_reactors_on_its_cpus() {
        let config = reactor::ReactorConfig { pin: false, ..Default::default() };
        let reactors = reactor::Reactors::start(&config).unwrap();
        let handles = reactors.handles();
        let cpu = handles[0].cpu();
        assert_eq!(reactors_of_mask(handles, None), Ok(vec![0]));
        assert_eq!(reactors_of_mask(handles, Some(&format!("[{cpu}]"))), Ok(vec![0]));
        assert_eq!(reactors_of_mask(handles, Some(&mask_of_reactors(handles, &[0]))), Ok(vec![0]));
        let absent = reactors_of_mask(handles, Some(&format!("[{}]", cpu + 1)));
        assert_eq!(absent, Err(CpuMaskError::NoReactor(cpu + 1)));
        assert!(matches!(reactors_of_mask(handles, Some("x")), Err(CpuMaskError::Syntax(_))));
        reactors.stop();
    }
}
