//! What would be changed, decided from a snapshot and nothing else.

use std::fmt;

use crate::Address;
use crate::bind::journal::Journal;
use crate::bind::snapshot::{Binding, Candidate, Snapshot};
use crate::bind::usage::Reason;

/// A driver to bind to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Driver {
    /// VFIO: the device reaches only what it is given.
    #[default]
    VfioPci,
    /// UIO: no IOMMU, no interrupts.
    UioPciGeneric,
    /// The kernel's own driver.
    Nvme,
}

impl Driver {
    /// All of them.
    pub const ALL: [Driver; 3] = [Driver::VfioPci, Driver::UioPciGeneric, Driver::Nvme];

    /// The name that the kernel knows it by.
    pub fn name(self) -> &'static str {
        match self {
            Driver::VfioPci => "vfio-pci",
            Driver::UioPciGeneric => "uio_pci_generic",
            Driver::Nvme => "nvme",
        }
    }
}

impl fmt::Display for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What is wanted.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// The functions; with `all`, besides every NVMe controller.
    pub addresses: Vec<Address>,
    /// Every NVMe controller that nothing speaks against.
    pub all: bool,
    /// What to bind to.
    pub driver: Driver,
    /// If not empty, the only functions that may be touched.
    pub allow: Vec<Address>,
    /// Functions that must not be touched.
    pub deny: Vec<Address>,
    /// Whether what is on a disk is of no interest. Who uses it always is.
    pub force_signature: bool,
    /// How many 2 MiB hugepages there should be at least.
    pub hugepages: Option<u64>,
}

/// One function's change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The function.
    pub address: Address,
    /// What it is bound to.
    pub from: Binding,
    /// What it will be bound to.
    pub to: Binding,
    /// Its disks, which disappear from the kernel.
    pub disks: Vec<String>,
    /// What to claim while it is taken from the kernel.
    pub(crate) claims: Vec<String>,
}

/// A function that is left alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The function.
    pub address: Address,
    /// Why, never empty.
    pub reasons: Vec<Reason>,
    /// Whether it was named, and not only found.
    pub named: bool,
}

/// What to do, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The number of 2 MiB hugepages now and afterwards.
    pub hugepages: Option<(u64, u64)>,
    /// Functions to rebind.
    pub changes: Vec<Change>,
    /// Functions that are left alone, and why.
    pub refusals: Vec<Refusal>,
    /// Functions that are bound as wanted already.
    pub unchanged: Vec<Address>,
}

/// One effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Let the function be bound to this driver only, or to any.
    Only(Option<String>),
    /// Take it from its driver.
    Unbind(String),
    /// Give it to a driver.
    Bind(String),
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::Only(Some(driver)) => write!(f, "driver_override = {driver}"),
            Step::Only(None) => f.write_str("driver_override = none"),
            Step::Unbind(driver) => write!(f, "unbind from {driver}"),
            Step::Bind(driver) => write!(f, "bind to {driver}"),
        }
    }
}

/// The effects that lead from one binding to another. What the function may be bound to is changed
/// first, so that nothing else takes it in between.
pub fn steps(from: &Binding, to: &Binding) -> Vec<Step> {
    let mut steps = Vec::new();
    if from.only != to.only {
        steps.push(Step::Only(to.only.clone()));
    }
    if from.driver != to.driver {
        steps.extend(from.driver.clone().map(Step::Unbind));
        steps.extend(to.driver.clone().map(Step::Bind));
    }
    steps
}

impl Plan {
    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty() && self.hugepages.is_none()
    }

    /// Whether a function that was named is left alone: then nothing should be done at all.
    pub fn is_refused(&self) -> bool {
        self.refusals.iter().any(|refusal| refusal.named)
    }
}

/// Decides what to bind.
pub fn plan(snapshot: &Snapshot, request: &Request) -> Plan {
    let mut plan = Plan::default();
    let mut addresses: Vec<Address> = request.addresses.clone();
    if request.all {
        let found = snapshot.candidates.iter().filter(|candidate| candidate.is_nvme());
        addresses.extend(found.map(|candidate| candidate.address));
    }
    addresses.sort();
    addresses.dedup();
    let to = Binding {
        driver: Some(request.driver.name().to_string()),
        only: (request.driver != Driver::Nvme).then(|| request.driver.name().to_string()),
    };
    for address in addresses {
        let named = request.addresses.contains(&address);
        let Some(candidate) = snapshot.candidate(address) else {
            plan.refusals.push(Refusal { address, reasons: vec![Reason::Missing], named });
            continue;
        };
        let mut reasons = unwanted(candidate, request);
        let done = candidate.binding.driver == to.driver;
        if reasons.is_empty() && done {
            plan.unchanged.push(address);
            continue;
        }
        reasons.extend(against(candidate, request.force_signature));
        reasons.extend(lacking(snapshot, candidate, request.driver));
        match reasons.is_empty() {
            true => plan.changes.push(change(candidate, to.clone())),
            false => plan.refusals.push(Refusal { address, reasons, named }),
        }
    }
    if request.driver == Driver::VfioPci {
        refuse_shared_groups(snapshot, request, &mut plan);
    }
    plan.hugepages = match (snapshot.hugepages, request.hugepages) {
        (Some(now), Some(wanted)) if now < wanted => Some((now, wanted)),
        _ => None,
    };
    plan.refusals.sort_by_key(|refusal| refusal.address);
    plan
}

/// Decides how to go back to what was before, for these functions or for all.
pub fn plan_undo(snapshot: &Snapshot, journal: &Journal, addresses: &[Address]) -> Plan {
    let mut plan = Plan::default();
    let selected = |address: &Address| addresses.is_empty() || addresses.contains(address);
    for (address, before) in journal.functions.iter().filter(|(address, _)| selected(address)) {
        // A function that is gone has nothing to go back to; applying an empty change forgets it.
        let Some(candidate) = snapshot.candidate(*address) else {
            plan.refusals.push(Refusal { address: *address, reasons: vec![Reason::Missing], named: false });
            continue;
        };
        if candidate.binding == *before {
            plan.unchanged.push(*address);
            continue;
        }
        // What is on it was looked at when it was taken; who uses it now is the question. A change of
        // what it may be bound to disturbs nobody.
        let moves = candidate.binding.driver != before.driver;
        let reasons = if moves { against(candidate, true) } else { Vec::new() };
        match reasons.is_empty() {
            true => plan.changes.push(change(candidate, before.clone())),
            false => plan.refusals.push(Refusal { address: *address, reasons, named: true }),
        }
    }
    let unknown = addresses.iter().filter(|address| !journal.functions.contains_key(address));
    plan.unchanged.extend(unknown.copied());
    let all = journal.functions.keys().all(selected);
    plan.hugepages = match (journal.hugepages, snapshot.hugepages) {
        // More than we ever set, or fewer than there were, is somebody else's doing.
        (Some((before, most)), Some(now)) if all && before < now && now <= most => Some((now, before)),
        _ => None,
    };
    plan
}

fn change(candidate: &Candidate, to: Binding) -> Change {
    Change {
        address: candidate.address,
        from: candidate.binding.clone(),
        to,
        disks: candidate.disks.clone(),
        claims: candidate.claims.clone(),
    }
}

/// What the request says against a function.
fn unwanted(candidate: &Candidate, request: &Request) -> Vec<Reason> {
    let mut reasons = Vec::new();
    if request.deny.contains(&candidate.address) {
        reasons.push(Reason::Denied);
    }
    if !request.allow.is_empty() && !request.allow.contains(&candidate.address) {
        reasons.push(Reason::NotAllowed);
    }
    if !candidate.is_nvme() {
        reasons.push(Reason::NotNvme { class: candidate.class });
    }
    reasons
}

/// What speaks against taking a function from its driver.
fn against(candidate: &Candidate, force_signature: bool) -> Vec<Reason> {
    let mut reasons = candidate.reasons.clone();
    if candidate.binding.driver.is_none() {
        reasons.push(Reason::Unknown);
    }
    reasons.retain(|reason| !(force_signature && reason.is_about_contents()));
    reasons
}

/// What is missing for a driver.
fn lacking(snapshot: &Snapshot, candidate: &Candidate, driver: Driver) -> Vec<Reason> {
    let mut reasons = Vec::new();
    if !snapshot.drivers.iter().any(|known| known == driver.name()) {
        reasons.push(Reason::NoDriver { driver: driver.name().to_string() });
    }
    if driver == Driver::VfioPci && candidate.iommu_group.is_none() && !snapshot.unsafe_no_iommu {
        reasons.push(Reason::NoIommu);
    }
    reasons
}

/// A group is VFIO's as a whole: a function whose mates stay with the kernel would be of no use. One
/// refusal may bring the next.
fn refuse_shared_groups(snapshot: &Snapshot, request: &Request, plan: &mut Plan) {
    loop {
        let stays = |(mate, driver): &&(Address, Option<String>)| {
            let moves = plan.changes.iter().any(|change| change.address == *mate);
            !moves && driver.as_ref().is_some_and(|driver| !driver.contains("vfio") && driver != "pci-stub")
        };
        let found = plan.changes.iter().enumerate().find_map(|(index, change)| {
            let candidate = snapshot.candidate(change.address)?;
            let (with, driver) = candidate.mates.iter().find(stays)?.clone();
            Some((index, Reason::Shared { group: candidate.iommu_group?, with, driver: driver? }))
        });
        let Some((index, reason)) = found else { return };
        let address = plan.changes.remove(index).address;
        let named = request.addresses.contains(&address);
        plan.refusals.push(Refusal { address, reasons: vec![reason], named });
    }
}
