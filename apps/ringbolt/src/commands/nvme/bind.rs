//! `ringbolt nvme bind`: binds controllers, and DMA engines, to drivers, and rejects what is in use.

use clap::Args;
use pci::PciAddress;
use pci::bind::{
    ApplyError, BindDriver, BindJournal, BindPlan, BindRequest, BindSnapshot, JOURNAL_PATH, LinuxHost,
    RefusalReason, apply, plan, plan_undo, steps,
};
use serde_json::{Value, json};

use crate::command_error::CommandError;
use crate::console::stdout_line;

#[derive(Args)]
#[command(
    arg_required_else_help = true,
    after_help = "Examples:\n  \
        ringbolt nvme bind --status                    # controllers, and why they cannot be bound\n  \
        ringbolt nvme bind 0000:03:00.0 --dry-run      # show the changes only\n  \
        ringbolt nvme bind 0000:03:00.0 --hugepages 512\n  \
        ringbolt nvme bind --all --deny 0000:01:00.0\n  \
        ringbolt nvme bind 03:00.0 --driver uio_pci_generic\n  \
        ringbolt nvme bind --undo                      # restore the original drivers\n\n\
        A controller is rejected while anything on its disks is mounted, used for swap, held (LVM, MD, dm-crypt, ZFS), \
        open exclusively or needed to boot, and while a disk has a file system, a partition table or other signature. \
        --force-signature overrides the last alone. With --all, rejected controllers are skipped; if a controller \
        given by address is rejected, nothing is changed and the exit status is 1.\n\n\
        Functions of Intel's I/OAT DMA engine can be given by address too, for ioat_scan_accel_module; they \
        are rejected while the kernel uses them. --all leaves them out."
)]
pub(crate) struct BindArgs {
    /// PCI addresses of controllers or of I/OAT functions, as 0000:03:00.0 or 03:00.0
    #[arg(value_name = "ADDRESS")]
    addresses: Vec<PciAddress>,
    /// Driver to bind to: vfio-pci, uio_pci_generic or nvme
    #[arg(long, default_value = "vfio-pci", value_parser = driver)]
    driver: BindDriver,
    /// Bind every NVMe controller that is not in use
    #[arg(long)]
    all: bool,
    /// Bind no controllers but these; may be repeated
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',')]
    allow: Vec<PciAddress>,
    /// Do not bind these; may be repeated
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',')]
    deny: Vec<PciAddress>,
    /// Bind controllers whose disks have file systems, partition tables or other signatures
    #[arg(long)]
    force_signature: bool,
    /// Reserve at least this many 2 MiB hugepages
    #[arg(long, value_name = "NUMBER")]
    hugepages: Option<u64>,
    /// Show the changes without making them
    #[arg(long)]
    dry_run: bool,
    /// Show controllers and I/OAT functions, what uses them, and what --undo restores
    #[arg(long, conflicts_with_all = ["addresses", "all", "allow", "deny", "force_signature", "hugepages", "undo"])]
    status: bool,
    /// Restore the original drivers of the given controllers, or of all, and then the hugepages too
    #[arg(long, conflicts_with_all = ["all", "allow", "deny", "force_signature", "hugepages"])]
    undo: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn driver(text: &str) -> Result<BindDriver, String> {
    let known = BindDriver::ALL.into_iter().find(|driver| driver.name() == text);
    known.ok_or_else(|| format!("expected one of {}", BindDriver::ALL.map(BindDriver::name).join(", ")))
}

pub(crate) fn run(options: &BindArgs) -> Result<(), CommandError> {
    let host = LinuxHost::default();
    let journal_path = journal_path()?;
    if options.status {
        return status(&host, &journal_path, options.json);
    }
    if options.addresses.is_empty() && !options.all && !options.undo && options.hugepages.is_none() {
        return Err(CommandError::usage("nothing to bind: give an ADDRESS, --all, --undo or --hugepages"));
    }
    let lock = format!("{}.lock", journal_path.trim_end_matches(".journal"));
    let _lock = match options.dry_run {
        true => None,
        false => Some(host.lock(&lock).map_err(|error| match error.kind() {
            std::io::ErrorKind::ResourceBusy => {
                CommandError::environment("another `ringbolt nvme bind` is running")
            }
            _ => CommandError::environment(format!("/{lock}: {error}; binding needs root")),
        })?),
    };
    let plan = if options.undo {
        let journal = BindJournal::load(&host, &journal_path).map_err(CommandError::environment)?;
        let bound: Vec<PciAddress> = journal.functions.keys().copied().collect();
        plan_undo(&BindSnapshot::read(&host, &bound), &journal, &options.addresses)
    } else {
        plan_binding(&host, options)
    };
    let should_apply = match (plan.is_refused(), options.dry_run) {
        (true, _) => {
            Err(CommandError::operation("nothing was changed: a controller given by address is rejected"))
        }
        (false, true) => Ok(false),
        (false, false) => Ok(true),
    };
    if !options.json {
        print_plan(&plan);
    }
    let result = should_apply
        .and_then(|yes| if yes { apply_plan(&host, &journal_path, &plan, options.json) } else { Ok(()) });
    if options.json {
        let applied = result.is_ok() && !options.dry_run;
        let error = result.as_ref().err().map(ToString::to_string);
        stdout_line!("{:#}", json!({ "plan": describe(&plan), "applied": applied, "error": error }));
    }
    result
}

/// The journal is in `/run`: a reboot clears it, as it clears bindings. Without root it is in the user's
/// runtime directory.
fn journal_path() -> Result<String, CommandError> {
    if rustix::process::geteuid().is_root() {
        return Ok(JOURNAL_PATH.to_string());
    }
    let folder = std::env::var("XDG_RUNTIME_DIR").ok().filter(|folder| folder.starts_with('/'));
    let folder = folder
        .ok_or_else(|| CommandError::environment("binding needs root (and XDG_RUNTIME_DIR is not set)"))?;
    Ok(format!("{}/ringbolt/bind.journal", folder.trim_matches('/')))
}

fn plan_binding(host: &LinuxHost, options: &BindArgs) -> BindPlan {
    let request = BindRequest {
        addresses: options.addresses.clone(),
        all: options.all,
        driver: options.driver,
        allow: options.allow.clone(),
        deny: options.deny.clone(),
        force_signature: options.force_signature,
        hugepages: options.hugepages,
    };
    let mut snapshot = BindSnapshot::read(host, &request.addresses);
    let name = options.driver.name();
    let wanted = options.all || !options.addresses.is_empty();
    if wanted && !snapshot.drivers.iter().any(|driver| driver == name) {
        if options.dry_run {
            if !options.json {
                stdout_line!("modprobe {name}");
            }
            snapshot.drivers.push(name.to_string());
        } else {
            // If modprobe fails, the plan rejects the binding: the driver is missing.
            let _ =
                std::process::Command::new("modprobe").arg(name).stderr(std::process::Stdio::null()).status();
            snapshot = BindSnapshot::read(host, &request.addresses);
        }
    }
    plan(&snapshot, &request)
}

fn apply_plan(
    host: &LinuxHost,
    journal_path: &str,
    plan: &BindPlan,
    quiet: bool,
) -> Result<(), CommandError> {
    let mut print_effect = |address: Option<PciAddress>, effect: &str| match address {
        _ if quiet => {}
        Some(address) => stdout_line!("  {address}: {effect}"),
        None => stdout_line!("  {effect}"),
    };
    apply(host, journal_path, plan, &mut print_effect).map_err(|error| match error {
        ApplyError::Journal(_) => CommandError::environment(error),
        _ => CommandError::operation(error),
    })
}

fn print_plan(plan: &BindPlan) {
    for change in &plan.changes {
        let name = |driver: &Option<String>| driver.clone().unwrap_or_else(|| "no driver".to_string());
        let disks = if change.disks.is_empty() || change.to.driver.as_deref() == Some("nvme") {
            String::new()
        } else {
            format!("; {} will disappear from /dev", change.disks.join(", "))
        };
        stdout_line!(
            "{}: {} -> {}{disks}",
            change.address,
            name(&change.from.driver),
            name(&change.to.driver)
        );
    }
    for refusal in &plan.refusals {
        stdout_line!("{}: rejected:", refusal.address);
        refusal.reasons.iter().for_each(|reason| stdout_line!("  {reason}"));
    }
    for address in &plan.unchanged {
        stdout_line!("{address}: nothing to do");
    }
    if let Some((from, to)) = plan.hugepages {
        stdout_line!("hugepages of 2 MiB: {from} -> {to}");
    }
    if plan.is_empty() && plan.refusals.is_empty() && plan.unchanged.is_empty() {
        stdout_line!("nothing to do");
    }
}

fn describe(plan: &BindPlan) -> Value {
    let binding = |binding: &pci::bind::Binding| json!({ "driver": binding.driver, "override": binding.driver_override });
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

fn reason(reason: &RefusalReason) -> Value {
    json!({ "kind": reason.kind(), "text": reason.to_string(), "overridable": reason.is_overridable() })
}

fn status(host: &LinuxHost, journal_path: &str, as_json: bool) -> Result<(), CommandError> {
    let journal = BindJournal::load(host, journal_path).map_err(CommandError::environment)?;
    let bound: Vec<PciAddress> = journal.functions.keys().copied().collect();
    let snapshot = BindSnapshot::read(host, &bound);
    if as_json {
        let functions = snapshot.candidates.iter().map(|one| {
            let before = journal.functions.get(&one.address);
            json!({
                "address": one.address.to_string(),
                "vendor": format!("{:04x}", one.id.0),
                "device": format!("{:04x}", one.id.1),
                "driver": one.binding.driver,
                "override": one.binding.driver_override,
                "iommu_group": one.iommu_group,
                "numa_node": one.numa_node,
                "disks": one.disks,
                "reasons": one.reasons.iter().map(reason).collect::<Vec<_>>(),
                "undo": before.map(|before| json!({ "driver": before.driver, "override": before.driver_override })),
            })
        });
        let functions: Vec<Value> = functions.collect();
        stdout_line!("{:#}", json!({ "functions": functions, "hugepages": snapshot.hugepages }));
        return Ok(());
    }
    if snapshot.candidates.is_empty() {
        stdout_line!("no NVMe controller and no I/OAT function on the PCI bus");
    }
    for one in &snapshot.candidates {
        let driver = one.binding.driver.as_deref().unwrap_or("no driver");
        let group = one
            .iommu_group
            .map_or_else(|| "no IOMMU group".to_string(), |group| format!("IOMMU group {group}"));
        let node = one.numa_node.map_or_else(String::new, |node| format!(", node {node}"));
        let disks = if one.disks.is_empty() { String::new() } else { format!(": {}", one.disks.join(", ")) };
        let kind = if one.is_ioat() { ", I/OAT" } else { "" };
        let (vendor, device) = one.id;
        stdout_line!("{} {vendor:04x}:{device:04x}{kind}, {driver}, {group}{node}{disks}", one.address);
        one.reasons.iter().for_each(|reason| stdout_line!("  {reason}"));
        if let Some(before) = journal.functions.get(&one.address) {
            stdout_line!("  --undo restores {}", before.driver.as_deref().unwrap_or("no driver"));
        }
    }
    if let Some(hugepages) = snapshot.hugepages {
        stdout_line!("hugepages of 2 MiB: {hugepages}");
    }
    Ok(())
}
