//! Planning of bindings, from a snapshot alone.

use std::fmt;

use crate::PciAddress;
use crate::bind::journal::BindJournal;
use crate::bind::snapshot::{BindSnapshot, Binding, Candidate};
use crate::bind::usage::RefusalReason;

/// A driver to bind functions to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BindDriver {
    /// VFIO: the IOMMU restricts the device to mapped memory.
    #[default]
    VfioPci,
    /// UIO: no IOMMU, no interrupts.
    UioPciGeneric,
    /// The kernel's NVMe driver.
    Nvme,
}

impl BindDriver {
    /// All drivers.
    pub const ALL: [BindDriver; 3] = [BindDriver::VfioPci, BindDriver::UioPciGeneric, BindDriver::Nvme];

    /// The kernel's name of the driver.
    pub fn name(self) -> &'static str {
        match self {
            BindDriver::VfioPci => "vfio-pci",
            BindDriver::UioPciGeneric => "uio_pci_generic",
            BindDriver::Nvme => "nvme",
        }
    }
}

impl fmt::Display for BindDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A request to bind functions to a driver.
#[derive(Clone, Debug, Default)]
pub struct BindRequest {
    /// The functions to bind; with `all`, in addition to all NVMe controllers.
    pub addresses: Vec<PciAddress>,
    /// Whether to bind every NVMe controller without a reason for refusal.
    pub all: bool,
    /// The driver to bind to.
    pub driver: BindDriver,
    /// If not empty, only these functions may be changed.
    pub allow: Vec<PciAddress>,
    /// Functions that must not be changed.
    pub deny: Vec<PciAddress>,
    /// Whether to ignore the contents of disks. Use of a disk is never ignored.
    pub force_signature: bool,
    /// Minimum number of 2 MiB hugepages.
    pub hugepages: Option<u64>,
}

/// The change of one function's binding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BindingChange {
    /// The function.
    pub address: PciAddress,
    /// The current binding.
    pub from: Binding,
    /// The new binding.
    pub to: Binding,
    /// Its disks, which disappear from the kernel.
    pub disks: Vec<String>,
    /// The device nodes to claim until the function is unbound.
    pub(crate) claims: Vec<String>,
}

/// A function that is not changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BindRefusal {
    /// The function.
    pub address: PciAddress,
    /// The reasons, at least one.
    pub reasons: Vec<RefusalReason>,
    /// Whether the request named the function, instead of `all` including it.
    pub named: bool,
}

/// The changes to apply, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BindPlan {
    /// The current and the new number of 2 MiB hugepages.
    pub hugepages: Option<(u64, u64)>,
    /// Functions to rebind.
    pub changes: Vec<BindingChange>,
    /// Functions that are not changed, with the reasons.
    pub refusals: Vec<BindRefusal>,
    /// Functions that have the requested binding already.
    pub unchanged: Vec<PciAddress>,
}

/// One step of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BindStep {
    /// Set `driver_override` to this driver, or clear it.
    SetOverride(Option<String>),
    /// Unbind the function from this driver.
    Unbind(String),
    /// Bind the function to this driver.
    Bind(String),
}

impl fmt::Display for BindStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BindStep::SetOverride(Some(driver)) => write!(f, "driver_override = {driver}"),
            BindStep::SetOverride(None) => f.write_str("driver_override = none"),
            BindStep::Unbind(driver) => write!(f, "unbind from {driver}"),
            BindStep::Bind(driver) => write!(f, "bind to {driver}"),
        }
    }
}

/// The steps from one binding to another. The first sets `driver_override`, so that no other driver can bind
/// the function in between.
pub fn steps(from: &Binding, to: &Binding) -> Vec<BindStep> {
    let mut steps = Vec::new();
    if from.driver_override != to.driver_override {
        steps.push(BindStep::SetOverride(to.driver_override.clone()));
    }
    if from.driver != to.driver {
        steps.extend(from.driver.clone().map(BindStep::Unbind));
        steps.extend(to.driver.clone().map(BindStep::Bind));
    }
    steps
}

impl BindPlan {
    /// Whether there is nothing to apply.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty() && self.hugepages.is_none()
    }

    /// Whether a named function is refused; then the plan should not be applied at all.
    pub fn is_refused(&self) -> bool {
        self.refusals.iter().any(|refusal| refusal.named)
    }
}

/// Plans the changes for a request.
pub fn plan(snapshot: &BindSnapshot, request: &BindRequest) -> BindPlan {
    let mut plan = BindPlan::default();
    let mut addresses: Vec<PciAddress> = request.addresses.clone();
    if request.all {
        let found = snapshot.candidates.iter().filter(|candidate| candidate.is_nvme());
        addresses.extend(found.map(|candidate| candidate.address));
    }
    addresses.sort();
    addresses.dedup();
    let to = Binding {
        driver: Some(request.driver.name().to_string()),
        driver_override: (request.driver != BindDriver::Nvme).then(|| request.driver.name().to_string()),
    };
    for address in addresses {
        let named = request.addresses.contains(&address);
        let Some(candidate) = snapshot.candidate(address) else {
            plan.refusals.push(BindRefusal { address, reasons: vec![RefusalReason::Missing], named });
            continue;
        };
        let mut reasons = policy_reasons(candidate, request);
        let done = candidate.binding.driver == to.driver;
        if reasons.is_empty() && done {
            plan.unchanged.push(address);
            continue;
        }
        reasons.extend(unbind_reasons(candidate, request.force_signature));
        reasons.extend(driver_reasons(snapshot, candidate, request.driver));
        match reasons.is_empty() {
            true => plan.changes.push(change(candidate, to.clone())),
            false => plan.refusals.push(BindRefusal { address, reasons, named }),
        }
    }
    if request.driver == BindDriver::VfioPci {
        refuse_shared_groups(snapshot, request, &mut plan);
    }
    plan.hugepages = match (snapshot.hugepages, request.hugepages) {
        (Some(now), Some(wanted)) if now < wanted => Some((now, wanted)),
        _ => None,
    };
    plan.refusals.sort_by_key(|refusal| refusal.address);
    plan
}

/// Plans to restore the original bindings in the journal, for these functions or, if empty, for all.
pub fn plan_undo(snapshot: &BindSnapshot, journal: &BindJournal, addresses: &[PciAddress]) -> BindPlan {
    let mut plan = BindPlan::default();
    let selected = |address: &PciAddress| addresses.is_empty() || addresses.contains(address);
    for (address, before) in journal.functions.iter().filter(|(address, _)| selected(address)) {
        // A removed function has no binding to restore; applying the plan removes its journal entry.
        let Some(candidate) = snapshot.candidate(*address) else {
            plan.refusals.push(BindRefusal {
                address: *address,
                reasons: vec![RefusalReason::Missing],
                named: false,
            });
            continue;
        };
        if candidate.binding == *before {
            plan.unchanged.push(*address);
            continue;
        }
        // Its contents were checked when it was bound; only its current use matters. A change of only
        // `driver_override` does not affect users.
        let driver_changes = candidate.binding.driver != before.driver;
        let reasons = if driver_changes { unbind_reasons(candidate, true) } else { Vec::new() };
        match reasons.is_empty() {
            true => plan.changes.push(change(candidate, before.clone())),
            false => plan.refusals.push(BindRefusal { address: *address, reasons, named: true }),
        }
    }
    let unknown = addresses.iter().filter(|address| !journal.functions.contains_key(address));
    plan.unchanged.extend(unknown.copied());
    let all = journal.functions.keys().all(selected);
    plan.hugepages = match (journal.hugepages, snapshot.hugepages) {
        // More than we ever set, or fewer than originally, is another program's change.
        (Some((before, highest)), Some(now)) if all && before < now && now <= highest => Some((now, before)),
        _ => None,
    };
    plan
}

fn change(candidate: &Candidate, to: Binding) -> BindingChange {
    BindingChange {
        address: candidate.address,
        from: candidate.binding.clone(),
        to,
        disks: candidate.disks.clone(),
        claims: candidate.claims.clone(),
    }
}

/// Reasons for refusal from the request itself.
fn policy_reasons(candidate: &Candidate, request: &BindRequest) -> Vec<RefusalReason> {
    let mut reasons = Vec::new();
    if request.deny.contains(&candidate.address) {
        reasons.push(RefusalReason::Denied);
    }
    if !request.allow.is_empty() && !request.allow.contains(&candidate.address) {
        reasons.push(RefusalReason::NotAllowed);
    }
    let is_driven = candidate.is_nvme() || (candidate.is_ioat() && request.driver != BindDriver::Nvme);
    if !is_driven {
        reasons.push(RefusalReason::NotNvme { class: candidate.class });
    }
    reasons
}

/// Reasons not to unbind a function from its driver.
fn unbind_reasons(candidate: &Candidate, force_signature: bool) -> Vec<RefusalReason> {
    let mut reasons = candidate.reasons.clone();
    // Of a DMA engine nothing is lost.
    if candidate.binding.driver.is_none() && !candidate.is_ioat() {
        reasons.push(RefusalReason::Unknown);
    }
    reasons.retain(|reason| !(force_signature && reason.is_overridable()));
    reasons
}

/// Missing prerequisites of the driver to bind.
fn driver_reasons(snapshot: &BindSnapshot, candidate: &Candidate, driver: BindDriver) -> Vec<RefusalReason> {
    let mut reasons = Vec::new();
    if !snapshot.drivers.iter().any(|known| known == driver.name()) {
        reasons.push(RefusalReason::NoDriver { driver: driver.name().to_string() });
    }
    if driver == BindDriver::VfioPci && candidate.iommu_group.is_none() && !snapshot.unsafe_no_iommu {
        reasons.push(RefusalReason::NoIommu);
    }
    reasons
}

/// VFIO requires that no function of an IOMMU group is bound to a kernel driver. Repeats, because a refusal
/// can make the group of another change unusable.
fn refuse_shared_groups(snapshot: &BindSnapshot, request: &BindRequest, plan: &mut BindPlan) {
    loop {
        let stays_bound = |(member, driver): &&(PciAddress, Option<String>)| {
            let moves = plan.changes.iter().any(|change| change.address == *member);
            !moves && driver.as_ref().is_some_and(|driver| !driver.contains("vfio") && driver != "pci-stub")
        };
        let found = plan.changes.iter().enumerate().find_map(|(index, change)| {
            let candidate = snapshot.candidate(change.address)?;
            let (with, driver) = candidate.group_members.iter().find(stays_bound)?.clone();
            Some((index, RefusalReason::Shared { group: candidate.iommu_group?, with, driver: driver? }))
        });
        let Some((index, reason)) = found else { return };
        let address = plan.changes.remove(index).address;
        let named = request.addresses.contains(&address);
        plan.refusals.push(BindRefusal { address, reasons: vec![reason], named });
    }
}
