//! `ringbolt nvme list`, `identify`, `log`, `format`, `reset` and `discover`.

use clap::{Args, ValueEnum};
use nvme::Uri;
use serde_json::{Value, json};
use wire_nvme::fabrics::Nqn;
use wire_nvme::identify::{Cns, IdentifyController, IdentifyNamespace, cmic};
use wire_nvme::log::{AnaLog, CommandEffectsLog, ErrorEntry, FirmwareSlots, HealthLog, LogId};
use wire_nvme::manage::{FormatNvm, SecureErase};

use super::session::{self, ControllerSession};
use crate::command_error::CommandError;
use crate::console::{self, stdout_line};

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    ringbolt nvme list\n  \
    ringbolt nvme list nvme+tcp://127.0.0.1:4420/nqn.2016-06.io.spdk:cnode1 --json")]
pub(crate) struct ListArgs {
    /// Controllers to attach and list with their namespaces; PCI functions are listed without attaching them
    #[arg(value_name = "URI")]
    uris: Vec<Uri>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    ringbolt nvme identify nvme+pcie://0000:03:00.0\n  \
    ringbolt nvme identify nvme+tcp://127.0.0.1:4420/nqn.2016-06.io.spdk:cnode1 --ns 1 --json\n  \
    ringbolt nvme identify nvme+vfio-user:/run/controller --raw > identify.bin")]
pub(crate) struct IdentifyArgs {
    /// The controller
    #[arg(value_name = "URI")]
    uri: Uri,
    /// Show the data of namespace N
    #[arg(long, value_name = "N")]
    ns: Option<u32>,
    /// Show the data of the controller, the default
    #[arg(long, conflicts_with = "ns")]
    ctrl: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Write the 4096 bytes unchanged
    #[arg(long, conflicts_with = "json")]
    raw: bool,
}

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    ringbolt nvme log nvme+pcie://0000:03:00.0 health\n  \
    ringbolt nvme log nvme+tcp://127.0.0.1:4420/nqn.2016-06.io.spdk:cnode1 ana --json")]
pub(crate) struct LogArgs {
    /// The controller
    #[arg(value_name = "URI")]
    uri: Uri,
    /// The log page
    page: LogPage,
    /// Print one JSON value
    #[arg(long)]
    json: bool,
    /// Write the bytes of the page unchanged
    #[arg(long, conflicts_with = "json")]
    raw: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LogPage {
    /// SMART / health information
    #[value(alias = "smart")]
    Health,
    /// Error information
    Error,
    /// Firmware slots
    Firmware,
    /// Asymmetric namespace access
    Ana,
    /// Commands supported, and their effects
    Effects,
    /// Discovery records, of a discovery controller
    Discovery,
}

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    ringbolt nvme format nvme+pcie://0000:03:00.0 --ns 1 --lbaf 1 --yes-destroy-data\n\n\
    All data of the namespace is lost. `ringbolt nvme identify URI --ns N` lists the formats.")]
pub(crate) struct FormatArgs {
    /// The controller
    #[arg(value_name = "URI")]
    uri: Uri,
    /// The namespace
    #[arg(long, value_name = "N")]
    ns: u32,
    /// Index of the LBA format
    #[arg(long, value_name = "INDEX", value_parser = clap::value_parser!(u8).range(0..64))]
    lbaf: u8,
    /// Confirm that all data of the namespace is lost
    #[arg(long)]
    yes_destroy_data: bool,
}

#[derive(Args)]
#[command(after_help = "Example:\n  ringbolt nvme reset nvme+pcie://0000:03:00.0")]
pub(crate) struct ResetArgs {
    /// The controller
    #[arg(value_name = "URI")]
    uri: Uri,
}

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    ringbolt nvme discover 127.0.0.1:4420\n  \
    ringbolt nvme discover [::1]:8009 --json")]
pub(crate) struct DiscoverArgs {
    /// The discovery controller, over RDMA as nvme+rdma://HOST:PORT; the default port is 8009
    #[arg(value_name = "HOST:PORT")]
    address: String,
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

/// The ASCII text of an identify field: other bytes become `?`, trailing spaces are removed.
fn ascii(bytes: &[u8]) -> String {
    bytes
        .iter()
        .map(|byte| if (32..127).contains(byte) { *byte as char } else { '?' })
        .collect::<String>()
        .trim_end()
        .into()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Decodes Identify Namespace data. A namespace of size 0 does not exist.
fn decode_namespace(data: &[u8], nsid: u32) -> Result<IdentifyNamespace, CommandError> {
    let page = data.first_chunk().expect("Identify returns 4096 bytes");
    let namespace = IdentifyNamespace::decode(page)
        .map_err(|error| CommandError::operation(format!("invalid Identify Namespace data: {error}")))?;
    if namespace.nsze == 0 {
        return Err(CommandError::operation(format!("there is no namespace {nsid}")));
    }
    Ok(namespace)
}

fn controller_json(identity: &IdentifyController) -> Value {
    json!({
        "vid": identity.vid,
        "sn": ascii(&identity.sn),
        "mn": ascii(&identity.mn),
        "fr": ascii(&identity.fr),
        "subnqn": identity.subnqn,
        "cntlid": identity.cntlid,
        "mdts": identity.mdts,
        "cmic": identity.cmic,
        "oacs": identity.oacs,
        "oncs": identity.oncs,
        "fuses": identity.fuses,
        "vwc": identity.vwc,
        "nn": identity.nn,
        "oaes": identity.oaes,
        "aerl": identity.async_events_max,
        "anatt_seconds": identity.anatt_s,
        "tnvmcap": identity.tnvmcap.to_string(),
        "unvmcap": identity.unvmcap.to_string(),
    })
}

fn namespace_json(nsid: u32, namespace: &IdentifyNamespace) -> Value {
    let formats = namespace.formats.iter().enumerate().map(|(index, format)| {
        json!({
            "lbaf": index,
            "data_bytes": 1u64 << format.data_log2.min(63),
            "metadata_bytes": format.metadata_bytes,
            "relative_performance": format.performance,
            "in_use": index == usize::from(namespace.format),
        })
    });
    json!({
        "nsid": nsid,
        "nsze": namespace.nsze,
        "ncap": namespace.ncap,
        "nuse": namespace.nuse,
        "nsfeat": namespace.nsfeat,
        "nmic": namespace.nmic,
        "dps": namespace.dps,
        "anagrpid": namespace.anagrpid,
        "nguid": hex(&namespace.nguid),
        "eui64": hex(&namespace.eui64),
        "formats": formats.collect::<Vec<_>>(),
    })
}

/// Prints a JSON value as lines of `name: value`, indented by nesting.
fn print_lines(value: &Value, indent: usize) {
    let pad = " ".repeat(indent);
    match value {
        Value::Object(object) => {
            for (name, value) in object {
                match value {
                    Value::Object(_) | Value::Array(_) => {
                        stdout_line!("{pad}{name}:");
                        print_lines(value, indent + 2);
                    }
                    Value::String(text) => stdout_line!("{pad}{name}: {text}"),
                    other => stdout_line!("{pad}{name}: {other}"),
                }
            }
        }
        Value::Array(list) => {
            for (index, value) in list.iter().enumerate() {
                match value {
                    Value::Object(_) | Value::Array(_) => {
                        stdout_line!("{pad}{index}:");
                        print_lines(value, indent + 2);
                    }
                    other => stdout_line!("{pad}{other}"),
                }
            }
        }
        other => stdout_line!("{pad}{other}"),
    }
}

fn print_value(value: &Value, as_json: bool) {
    if as_json {
        stdout_line!("{value:#}");
    } else {
        print_lines(value, 0);
    }
}

pub(crate) fn list(options: &ListArgs) -> Result<(), CommandError> {
    let functions = pci::enumerate(&pci::Sysfs::default()).map_err(CommandError::environment)?;
    let functions: Vec<Value> = functions
        .iter()
        .filter(|info| info.is_nvme())
        .map(|info| {
            json!({
                "address": info.address.to_string(),
                "vendor": format!("{:04x}", info.vendor),
                "device": format!("{:04x}", info.device),
                "driver": info.driver,
                "iommu_group": info.iommu_group,
                "numa_node": info.numa_node,
            })
        })
        .collect();
    let mut controllers = Vec::new();
    for uri in &options.uris {
        let name = uri.controller();
        let one = session::with_controller(uri, move |mut session| async move {
            let mut namespaces = Vec::new();
            for nsid in session.namespaces().await? {
                let data = session.identify(Cns::Namespace, nsid).await?;
                let namespace = decode_namespace(&data, nsid)?;
                let format = namespace.formats.get(usize::from(namespace.format));
                let block_size = format.map_or(0, |format| 1u64 << format.data_log2.min(63));
                namespaces.push(json!({ "nsid": nsid, "blocks": namespace.nsze, "block_size": block_size }));
            }
            let identity = session.identity();
            Ok(json!({
                "controller": name,
                "model_number": ascii(&identity.mn),
                "serial_number": ascii(&identity.sn),
                "firmware_revision": ascii(&identity.fr),
                "namespaces": namespaces,
            }))
        });
        controllers.push(one?);
    }
    if !options.json && functions.is_empty() && controllers.is_empty() {
        stdout_line!("no NVMe controllers on the PCI bus");
        return Ok(());
    }
    print_value(&json!({ "functions": functions, "controllers": controllers }), options.json);
    Ok(())
}

pub(crate) fn identify(options: &IdentifyArgs) -> Result<(), CommandError> {
    let nsid = options.ns;
    let (data, value) = session::with_controller(&options.uri, move |mut session| async move {
        match nsid {
            Some(nsid) => {
                let data = session.identify(Cns::Namespace, nsid).await?;
                let value = namespace_json(nsid, &decode_namespace(&data, nsid)?);
                Ok((data, value))
            }
            None => {
                let data = session.identify(Cns::Controller, 0).await?;
                let value = controller_json(session.identity());
                Ok((data, value))
            }
        }
    })?;
    if options.raw {
        console::print(&data);
        return Ok(());
    }
    print_value(&value, options.json);
    Ok(())
}

/// Limit of error log entries that are read; the log may have 256.
const ERRORS_MAX: usize = 64;

pub(crate) fn log(options: &LogArgs) -> Result<(), CommandError> {
    if options.page == LogPage::Discovery {
        return discovery(options.uri.clone(), options.json);
    }
    let page = options.page;
    let (data, value) = session::with_controller(&options.uri, move |mut session| async move {
        read_page(&mut session, page).await
    })?;
    if options.raw {
        console::print(&data);
        return Ok(());
    }
    print_value(&value, options.json);
    Ok(())
}

async fn read_page(session: &mut ControllerSession, page: LogPage) -> Result<(Vec<u8>, Value), CommandError> {
    let short = || CommandError::operation("the log page is too short");
    match page {
        LogPage::Health => {
            let data = session.log(LogId::Health.to_wire(), HealthLog::SIZE).await?;
            let health = HealthLog::decode(data.first_chunk().ok_or_else(short)?);
            Ok((data, bdev_nvme::rpc::health_json(&health)))
        }
        LogPage::Error => {
            let count = usize::from(session.identity().error_log_entries).clamp(1, ERRORS_MAX);
            let data = session.log(LogId::ErrorInformation.to_wire(), count * ErrorEntry::SIZE).await?;
            let entries = data.as_chunks::<{ ErrorEntry::SIZE }>().0.iter().map(ErrorEntry::decode);
            let one = |entry: ErrorEntry| {
                json!({ "count": entry.count, "sqid": entry.sqid, "cid": entry.cid,
                    "status": entry.status.to_string(), "lba": entry.lba, "nsid": entry.nsid })
            };
            // An error count of 0 marks an unused entry.
            let entries: Vec<Value> = entries.filter(|entry| entry.count != 0).map(one).collect();
            Ok((data, json!({ "errors": entries })))
        }
        LogPage::Firmware => {
            let data = session.log(LogId::FirmwareSlot.to_wire(), FirmwareSlots::SIZE).await?;
            let slots = FirmwareSlots::decode(data.first_chunk().ok_or_else(short)?);
            let revisions: Vec<String> = slots
                .revisions
                .iter()
                .map(|one| ascii(one.split(|byte| *byte == 0).next().unwrap_or(&[])))
                .collect();
            Ok((
                data,
                json!({ "active_slot": slots.active, "next_slot": slots.next, "revisions": revisions }),
            ))
        }
        LogPage::Ana => {
            let identity = session.identity();
            if identity.cmic & cmic::ANA == 0 {
                return Err(CommandError::operation(
                    "the controller does not report asymmetric namespace access",
                ));
            }
            // Every group with its namespaces, within bounds that no real controller exceeds.
            let groups = identity.nanagrpid.clamp(1, 4096) as usize;
            let namespaces = identity.nn.clamp(1, 65536) as usize;
            let length = AnaLog::HEADER_SIZE + groups * AnaLog::GROUP_SIZE + namespaces * 4;
            let data = session.log(LogId::Ana.to_wire(), length.next_multiple_of(4)).await?;
            let log = AnaLog::decode(&data)
                .map_err(|error| CommandError::operation(format!("invalid ANA log page: {error}")))?;
            let groups = log.groups.iter().map(|group| {
                json!({ "group": group.id, "state": bdev_nvme::ana_name(group.state),
                    "change_count": group.change_count, "namespaces": group.nsids })
            });
            let value = json!({ "change_count": log.change_count, "groups": groups.collect::<Vec<_>>() });
            Ok((data, value))
        }
        LogPage::Effects => {
            let data = session.log(LogId::CommandEffects.to_wire(), CommandEffectsLog::SIZE).await?;
            let log = CommandEffectsLog::decode(data.first_chunk().ok_or_else(short)?);
            let table = |commands: &[wire_nvme::log::CommandEffects]| {
                let supported = commands.iter().enumerate().filter(|(_, one)| one.supported);
                let one = |(opcode, effects): (usize, &wire_nvme::log::CommandEffects)| {
                    json!({ "opcode": format!("{opcode:#04x}"), "changes_blocks": effects.changes_blocks,
                        "changes_namespace": effects.changes_namespace,
                        "changes_inventory": effects.changes_inventory,
                        "changes_controller": effects.changes_controller })
                };
                supported.map(one).collect::<Vec<_>>()
            };
            let value = json!({ "admin": table(&log.admin), "io": table(&log.io) });
            Ok((data, value))
        }
        LogPage::Discovery => {
            Err(CommandError::usage("discovery records are read from a discovery controller"))
        }
    }
}

pub(crate) fn format(options: &FormatArgs) -> Result<(), CommandError> {
    if !options.yes_destroy_data {
        return Err(CommandError::usage(format!(
            "formatting destroys all data of namespace {} of {}; add --yes-destroy-data to confirm",
            options.ns,
            options.uri.controller()
        )));
    }
    let (nsid, lbaf) = (options.ns, options.lbaf);
    session::with_controller(&options.uri, move |mut session| async move {
        let data = session.identify(Cns::Namespace, nsid).await?;
        let namespace = decode_namespace(&data, nsid)?;
        let count = namespace.formats.len();
        let format = namespace.formats.get(usize::from(lbaf)).ok_or_else(|| {
            CommandError::usage(format!("namespace {nsid} has formats 0 to {}", count.saturating_sub(1)))
        })?;
        let bytes = 1u64 << format.data_log2.min(63);
        let command = FormatNvm {
            format: lbaf,
            extended_lba: false,
            protection: 0,
            protection_first: false,
            secure_erase: SecureErase::None,
        };
        let result = session.read(command.to_sqe(nsid), 0).await;
        result.map_err(|error| CommandError::operation(format!("Format NVM: {error}")))?;
        stdout_line!("namespace {nsid} was formatted to blocks of {bytes} bytes");
        Ok(())
    })
}

pub(crate) fn reset(options: &ResetArgs) -> Result<(), CommandError> {
    let name = options.uri.controller();
    session::with_controller(&options.uri, move |mut session| async move {
        session.reset().await?;
        stdout_line!("{name} was reset");
        Ok(())
    })
}

pub(crate) fn discover(options: &DiscoverArgs) -> Result<(), CommandError> {
    let rdma = options.address.strip_prefix("nvme+rdma://");
    let scheme = if rdma.is_some() { "nvme+rdma" } else { "nvme+tcp" };
    let tcp = options.address.strip_prefix("nvme+tcp://");
    let address = rdma.or(tcp).unwrap_or(&options.address);
    let address = address.strip_suffix('/').unwrap_or(address);
    let has_port = address.rsplit_once(':').is_some_and(|(host, port)| {
        port.parse::<u16>().is_ok() && (!host.contains(':') || host.ends_with(']'))
    });
    let address = if has_port { address.to_string() } else { format!("{address}:8009") };
    let uri = format!("{scheme}://{address}/{}", Nqn::discovery().as_str());
    discovery(uri.parse().map_err(CommandError::usage)?, options.json)
}

fn discovery(uri: Uri, as_json: bool) -> Result<(), CommandError> {
    let entries = session::run_on_reactor(false, move |core| async move {
        let name = uri.controller();
        let entries = bdev_nvme::discover(&core, &uri, &nvme::Options::default()).await;
        entries.map_err(|error| CommandError::operation(format!("{name}: {error}")))
    })?;
    let one = |entry: &wire_nvme::log::DiscoveryEntry| {
        json!({
            "trtype": format!("{:?}", entry.address.trtype).to_uppercase(),
            "adrfam": format!("{:?}", entry.address.adrfam),
            "traddr": entry.address.traddr,
            "trsvcid": entry.address.trsvcid,
            "subtype": format!("{:?}", entry.subtype).to_lowercase(),
            "subnqn": entry.subnqn.as_str(),
            "portid": entry.portid,
        })
    };
    print_value(&entries.iter().map(one).collect::<Vec<_>>().into(), as_json);
    Ok(())
}
