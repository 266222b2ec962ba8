//! Binding controllers to drivers, without taking a disk that is in use.

use clap::Args;
use pci::Address;
use pci::bind::{
    ApplyError, Driver, Host, JOURNAL, Journal, Plan, Reason, Request, Snapshot, apply, plan, plan_undo,
    steps,
};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::say::say;

#[derive(Args)]
#[command(
    arg_required_else_help = true,
    after_help = "Examples:\n  \
        ringbolt nvme bind --status                    # what is there, and what speaks against taking it\n  \
        ringbolt nvme bind 0000:03:00.0 --dry-run      # what would be done\n  \
        ringbolt nvme bind 0000:03:00.0 --hugepages 512\n  \
        ringbolt nvme bind --all --deny 0000:01:00.0\n  \
        ringbolt nvme bind 03:00.0 --driver uio_pci_generic\n  \
        ringbolt nvme bind --undo                      # everything as it was\n\n\
        A controller is refused while anything on its disks is mounted, swapped to, held (LVM, MD, dm-crypt, ZFS),\n\
        open exclusively or needed to boot, and while a disk has a file system, a partition table or the like on it.\n\
        --force-signature overrides the last alone. With --all, what is refused is left out; a controller that is\n\
        named and refused means that nothing is done, and status 1."
)]
pub(crate) struct Bind {
    /// PCI addresses of controllers, as 0000:03:00.0 or 03:00.0
    #[arg(value_name = "ADDRESS")]
    addresses: Vec<Address>,
    /// Driver to bind to: vfio-pci, uio_pci_generic or nvme
    #[arg(long, default_value = "vfio-pci", value_parser = driver)]
    driver: Driver,
    /// Every NVMe controller that nothing speaks against
    #[arg(long)]
    all: bool,
    /// Touch no others than these; may be repeated
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',')]
    allow: Vec<Address>,
    /// Leave these alone; may be repeated
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',')]
    deny: Vec<Address>,
    /// Take disks that have file systems, partition tables or the like on them
    #[arg(long)]
    force_signature: bool,
    /// Have at least so many hugepages of 2 MiB
    #[arg(long, value_name = "NUMBER")]
    hugepages: Option<u64>,
    /// Say what would be done, and do nothing
    #[arg(long)]
    dry_run: bool,
    /// Show controllers, what uses their disks, and what can be undone
    #[arg(long, conflicts_with_all = ["addresses", "all", "allow", "deny", "force_signature", "hugepages", "undo"])]
    status: bool,
    /// Give controllers back to the drivers that they had: these, or all, and then hugepages too
    #[arg(long, conflicts_with_all = ["all", "allow", "deny", "force_signature", "hugepages"])]
    undo: bool,
    /// Answer with one JSON object
    #[arg(long)]
    json: bool,
}

fn driver(text: &str) -> Result<Driver, String> {
    let known = Driver::ALL.into_iter().find(|driver| driver.name() == text);
    known.ok_or_else(|| format!("it is one of {}", Driver::ALL.map(Driver::name).join(", ")))
}

pub(crate) fn run(options: &Bind) -> Result<(), Failure> {
    let host = Host::default();
    let journal_path = journal_path()?;
    if options.status {
        return status(&host, &journal_path, options.json);
    }
    if options.addresses.is_empty() && !options.all && !options.undo && options.hugepages.is_none() {
        return Err(Failure::usage("nothing was named: an ADDRESS, --all, --undo or --hugepages"));
    }
    let lock = format!("{}.lock", journal_path.trim_end_matches(".journal"));
    let _alone = match options.dry_run {
        true => None,
        false => Some(host.lock(&lock).map_err(|error| match error.kind() {
            std::io::ErrorKind::ResourceBusy => Failure::machine("another `ringbolt nvme bind` is at work"),
            _ => Failure::machine(format!("/{lock}: {error}; binding needs root")),
        })?),
    };
    let plan = if options.undo {
        let journal = Journal::load(&host, &journal_path).map_err(Failure::machine)?;
        let touched: Vec<Address> = journal.functions.keys().copied().collect();
        plan_undo(&Snapshot::read(&host, &touched), &journal, &options.addresses)
    } else {
        plan_binding(&host, options)
    };
    let verdict = match (plan.is_refused(), options.dry_run) {
        (true, _) => Err(Failure::work("nothing was changed: a controller that was named is refused")),
        (false, true) => Ok(false),
        (false, false) => Ok(true),
    };
    if !options.json {
        tell(&plan);
    }
    let done =
        verdict.and_then(|go| if go { carry_out(&host, &journal_path, &plan, options.json) } else { Ok(()) });
    if options.json {
        let applied = done.is_ok() && !options.dry_run;
        let error = done.as_ref().err().map(ToString::to_string);
        say!("{:#}", json!({ "plan": describe(&plan), "applied": applied, "error": error }));
    }
    done
}

/// In `/run`, which a reboot clears as it clears bindings; of one's own without root.
fn journal_path() -> Result<String, Failure> {
    if rustix::process::geteuid().is_root() {
        return Ok(JOURNAL.to_string());
    }
    let folder = std::env::var("XDG_RUNTIME_DIR").ok().filter(|folder| folder.starts_with('/'));
    let folder = folder
        .ok_or_else(|| Failure::machine("binding needs root (XDG_RUNTIME_DIR names no folder either)"))?;
    Ok(format!("{}/ringbolt/bind.journal", folder.trim_matches('/')))
}

fn plan_binding(host: &Host, options: &Bind) -> Plan {
    let request = Request {
        addresses: options.addresses.clone(),
        all: options.all,
        driver: options.driver,
        allow: options.allow.clone(),
        deny: options.deny.clone(),
        force_signature: options.force_signature,
        hugepages: options.hugepages,
    };
    let mut snapshot = Snapshot::read(host, &request.addresses);
    let name = options.driver.name();
    let wanted = options.all || !options.addresses.is_empty();
    if wanted && !snapshot.drivers.iter().any(|driver| driver == name) {
        if options.dry_run {
            if !options.json {
                say!("modprobe {name}");
            }
            snapshot.drivers.push(name.to_string());
        } else {
            // Where it fails, the plan says that there is no such driver.
            let _ =
                std::process::Command::new("modprobe").arg(name).stderr(std::process::Stdio::null()).status();
            snapshot = Snapshot::read(host, &request.addresses);
        }
    }
    plan(&snapshot, &request)
}

fn carry_out(host: &Host, journal_path: &str, plan: &Plan, quiet: bool) -> Result<(), Failure> {
    let mut say_effect = |address: Option<Address>, effect: &str| match address {
        _ if quiet => {}
        Some(address) => say!("  {address}: {effect}"),
        None => say!("  {effect}"),
    };
    apply(host, journal_path, plan, &mut say_effect).map_err(|error| match error {
        ApplyError::Journal(_) => Failure::machine(error),
        _ => Failure::work(error),
    })
}

fn tell(plan: &Plan) {
    for change in &plan.changes {
        let name = |driver: &Option<String>| driver.clone().unwrap_or_else(|| "no driver".to_string());
        let disks = if change.disks.is_empty() || change.to.driver.as_deref() == Some("nvme") {
            String::new()
        } else {
            format!("; the kernel loses {}", change.disks.join(", "))
        };
        say!("{}: {} -> {}{disks}", change.address, name(&change.from.driver), name(&change.to.driver));
    }
    for refusal in &plan.refusals {
        say!("{}: left alone:", refusal.address);
        refusal.reasons.iter().for_each(|reason| say!("  {reason}"));
    }
    for address in &plan.unchanged {
        say!("{address}: nothing to do");
    }
    if let Some((from, to)) = plan.hugepages {
        say!("hugepages of 2 MiB: {from} -> {to}");
    }
    if plan.is_empty() && plan.refusals.is_empty() && plan.unchanged.is_empty() {
        say!("nothing to do");
    }
}

fn describe(plan: &Plan) -> Value {
    let binding =
        |binding: &pci::bind::Binding| json!({ "driver": binding.driver, "override": binding.only });
    let changes = plan.changes.iter().map(|change| {
        let steps = steps(&change.from, &change.to);
        json!({
            "address": change.address.to_string(),
            "from": binding(&change.from),
            "to": binding(&change.to),
            "disks": change.disks,
            "steps": steps.iter().map(ToString::to_string).collect::<Vec<_>>(),
        })
    });
    let refusals = plan.refusals.iter().map(|refusal| {
        json!({
            "address": refusal.address.to_string(),
            "named": refusal.named,
            "reasons": refusal.reasons.iter().map(reason).collect::<Vec<_>>(),
        })
    });
    json!({
        "changes": changes.collect::<Vec<_>>(),
        "refusals": refusals.collect::<Vec<_>>(),
        "unchanged": plan.unchanged.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "hugepages": plan.hugepages.map(|(from, to)| json!({ "from": from, "to": to })),
    })
}

fn reason(reason: &Reason) -> Value {
    json!({ "kind": reason.kind(), "text": reason.to_string(), "overridable": reason.is_about_contents() })
}

fn status(host: &Host, journal_path: &str, as_json: bool) -> Result<(), Failure> {
    let journal = Journal::load(host, journal_path).map_err(Failure::machine)?;
    let touched: Vec<Address> = journal.functions.keys().copied().collect();
    let snapshot = Snapshot::read(host, &touched);
    if as_json {
        let functions = snapshot.candidates.iter().map(|one| {
            let before = journal.functions.get(&one.address);
            json!({
                "address": one.address.to_string(),
                "vendor": format!("{:04x}", one.id.0),
                "device": format!("{:04x}", one.id.1),
                "driver": one.binding.driver,
                "override": one.binding.only,
                "iommu_group": one.iommu_group,
                "numa_node": one.numa_node,
                "disks": one.disks,
                "reasons": one.reasons.iter().map(reason).collect::<Vec<_>>(),
                "undo": before.map(|before| json!({ "driver": before.driver, "override": before.only })),
            })
        });
        let functions: Vec<Value> = functions.collect();
        say!("{:#}", json!({ "functions": functions, "hugepages": snapshot.hugepages }));
        return Ok(());
    }
    if snapshot.candidates.is_empty() {
        say!("there is no NVMe controller on the PCI bus");
    }
    for one in &snapshot.candidates {
        let driver = one.binding.driver.as_deref().unwrap_or("no driver");
        let group = one
            .iommu_group
            .map_or_else(|| "no IOMMU group".to_string(), |group| format!("IOMMU group {group}"));
        let node = one.numa_node.map_or_else(String::new, |node| format!(", node {node}"));
        let disks = if one.disks.is_empty() { String::new() } else { format!(": {}", one.disks.join(", ")) };
        say!("{} {:04x}:{:04x}, {driver}, {group}{node}{disks}", one.address, one.id.0, one.id.1);
        one.reasons.iter().for_each(|reason| say!("  {reason}"));
        if let Some(before) = journal.functions.get(&one.address) {
            say!("  --undo gives it back to {}", before.driver.as_deref().unwrap_or("no driver"));
        }
    }
    if let Some(hugepages) = snapshot.hugepages {
        say!("hugepages of 2 MiB: {hugepages}");
    }
    Ok(())
}
