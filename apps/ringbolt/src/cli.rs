//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// User-space block storage: a target for NVMe (TCP, vfio-user), iSCSI, vhost-user (block, SCSI), NBD and
/// ublk, its JSON-RPC client, a replicated store, a load generator, NVMe tools, device models and a lab.
#[derive(Parser)]
#[command(
    name = "ringbolt",
    version,
    arg_required_else_help = true,
    after_help = "Examples:\n  \
        ringbolt demo --once\n  \
        ringbolt serve -c target.json\n  \
        ringbolt rpc bdev_get_bdevs\n  \
        ringbolt perf --filename=null:1g --rw=randread --iodepth=128 --time_based --runtime=5s\n\n\
        Exit status: 0 success; 1 an I/O, a data check or a method failed; 2 invalid command line;\n  \
        3 invalid configuration; 4 the machine lacks something; 5 no server answers on the RPC socket."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: CliCommand,
}

#[derive(Subcommand)]
pub(crate) enum CliCommand {
    /// Serve block devices over NVMe (TCP, vfio-user), iSCSI, vhost-user (block, SCSI), NBD and ublk,
    /// configured by a file and by JSON-RPC
    Serve(Serve),
    /// Call a JSON-RPC method of a running server
    Rpc(Rpc),
    /// Print a running server's recent I/O, event by event
    Trace(crate::commands::trace::Trace),
    /// Generate load on a device or a target with fio's options, and measure it
    Perf(Box<Perf>),
    /// Serve a file over NVMe/TCP, generate load on it, and show IOPS, latency and CPU cost
    Demo(Demo),
    /// Characterise this machine's I/O stacks and schedulers, report and compare results, and import fio's
    #[command(after_help = "Example:\n  ringbolt lab import fio-output.json --output-format=csv")]
    Lab {
        #[command(subcommand)]
        command: crate::commands::lab::LabCommand,
    },
    /// Bind NVMe controllers to user-space drivers, and inspect them
    #[command(after_help = "Example:\n  ringbolt nvme bind --status")]
    Nvme {
        #[command(subcommand)]
        command: crate::commands::nvme::NvmeCommand,
    },
    /// NVMe device models: list profiles, and compare them with published measurements
    #[command(after_help = "Examples:\n  ringbolt model list\n  ringbolt model fit samsung-980-pro\n  \
        ringbolt perf --filename=model:samsung-980-pro --rw=randread --iodepth=32 --runtime=5 --time_based")]
    Model {
        #[command(subcommand)]
        command: crate::commands::model::ModelCommand,
    },
    /// Create, list, resize and remove images, the thin volumes in a server's stores
    #[command(after_help = "Examples:\n  ringbolt image create vol 10g\n  ringbolt image list")]
    Image {
        #[command(subcommand)]
        command: crate::commands::image::ImageCommand,
    },
    /// Run a cluster of the replicated store on this machine, and show its state
    #[command(after_help = "Examples:\n  ringbolt store up\n  ringbolt store status\n  ringbolt store demo")]
    Store {
        #[command(subcommand)]
        command: crate::commands::store::StoreCommand,
    },
    /// Format, check and list the object store on a file or block device that no server uses
    #[command(
        after_help = "Examples:\n  ringbolt objects format --size=10g store.img\n  ringbolt objects check store.img\n  \
        ringbolt objects dump --json /dev/nvme0n1\n\n\
        A server opens it with bdev_uring_create and store_open; ringbolt image create makes a volume in it."
    )]
    Objects {
        #[command(subcommand)]
        command: crate::commands::objects::ObjectsCommand,
    },
    /// Create, list, snapshot, clone, resize and remove the logical volumes of a running server
    #[command(after_help = "Examples:\n  ringbolt lvol create --on nvme0n1 pool\n  \
        ringbolt lvol create --thin pool/vol 10g\n  ringbolt lvol snapshot pool/vol before-update\n  \
        ringbolt lvol list\n\nA store has its name, a volume that of its store and its own: STORE/VOLUME.")]
    Lvol {
        #[command(subcommand)]
        command: crate::commands::lvol::LvolCommand,
    },
    /// List, print, check and repair the blobstores of SPDK, with their logical volumes
    #[command(
        after_help = "Examples:\n  ringbolt blob list disk.img\n  ringbolt blob check /dev/nvme0n1\n  \
        ringbolt blob dump --json disk.img\n  ringbolt blob repair --apply disk.img\n\n\
        No program may have the file or device open for writing."
    )]
    Blob {
        #[command(subcommand)]
        command: crate::commands::blob::BlobCommand,
    },
    /// Print the reference of all JSON-RPC methods, docs/RPC.md
    #[command(hide = true)]
    RpcReference {
        /// Print the parameters without effect instead, docs/PARAMETERS.md
        #[arg(long)]
        without_effect: bool,
    },
    /// Print the reference of all metrics, docs/METRICS.md
    #[command(hide = true)]
    MetricsReference,
    /// Print a completion script for a shell
    #[command(after_help = "Example:\n  ringbolt completions bash > /etc/bash_completion.d/ringbolt")]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// Options of every command that starts reactors.
#[derive(Args)]
pub(crate) struct ReactorOptions {
    /// What an idle reactor does
    #[arg(long, value_enum, default_value = "adaptive")]
    pub(crate) idle: Idle,
    /// Limit of memory for I/O buffers, as 512m or 2g [default: 1g, at most half of the machine's]
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<String>,
    /// Kernel interface for I/O and events
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) engine: EngineChoice,
}

#[derive(Clone, Copy, Default, ValueEnum)]
pub(crate) enum EngineChoice {
    /// io_uring where it is allowed, otherwise epoll
    #[default]
    Auto,
    /// io_uring; fails where it is not allowed
    Uring,
    /// epoll: sockets only, no bdev_uring
    Epoll,
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Idle {
    /// Poll for 100 us, then sleep until an event arrives
    Adaptive,
    /// Always poll: lowest latency, uses a whole core for each reactor
    Spin,
    /// Sleep at once
    Sleep,
}

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    ringbolt serve -c target.json\n  \
    ringbolt serve --cores 2-3 --idle spin\n  \
    ringbolt serve -r /var/tmp/spdk.sock      # the default socket of SPDK's rpc.py\n  \
    ringbolt serve -S /run/vhost              # vhost-user sockets in this directory\n\n\
    Front ends, and the methods of `ringbolt rpc` that start them:\n  \
    NVMe over TCP       nvmf_create_transport trtype=TCP, nvmf_subsystem_add_listener\n  \
    NVMe, vfio-user     nvmf_create_transport trtype=VFIOUSER, nvmf_subsystem_add_listener\n  \
    iSCSI               iscsi_create_portal_group, iscsi_create_target_node\n  \
    vhost-user block    vhost_create_blk_controller\n  \
    vhost-user SCSI     vhost_create_scsi_controller, vhost_scsi_controller_add_target\n  \
    NBD                 nbd_export_create; nbd_start_disk for /dev/nbdN of this machine\n  \
    ublk                ublk_create_target, ublk_start_disk: /dev/ublkbN of this machine\n\n\
    The file has SPDK's format: {\"subsystems\":[{\"subsystem\":\"bdev\",\"config\":[{\"method\":…,\"params\":…}]}]}. \
    `ringbolt rpc save_config` writes one. On SIGINT and SIGTERM the server completes I/O in flight and exits.")]
pub(crate) struct Serve {
    /// SPDK JSON configuration file
    #[arg(short, long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// UNIX socket of the JSON-RPC server
    #[arg(short, long, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    pub(crate) rpc_socket: PathBuf,
    /// Cores to run on, one pinned reactor each, as 0-3,5 or 0x2f [default: one reactor, not pinned]
    #[arg(long, short = 'm', value_name = "LIST")]
    pub(crate) cores: Option<String>,
    /// Apply the file only when framework_start_init is called
    #[arg(long)]
    pub(crate) wait_for_rpc: bool,
    /// Directory of the sockets of vhost controllers [default: the current one]
    #[arg(short = 'S', long, value_name = "DIR")]
    pub(crate) vhost_socket_dir: Option<PathBuf>,
    /// Absolute path of a folder for keys that calls pass by value: a file each, which saved configurations
    /// name
    #[arg(long, value_name = "DIR")]
    pub(crate) key_folder: Option<PathBuf>,
    /// End when standard input does: with the process that has the other end of the pipe
    #[arg(long, hide = true)]
    pub(crate) until_stdin_closes: bool,
    #[command(flatten)]
    pub(crate) reactor_options: ReactorOptions,
}

pub(crate) const DEFAULT_SOCKET: &str = "/var/tmp/ringbolt.sock";

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    ringbolt rpc --list\n  \
    ringbolt rpc bdev_malloc_create name=Malloc0 num_blocks=131072 block_size=512\n  \
    ringbolt rpc nvmf_subsystem_add_listener nqn=nqn.2025-01.io.ringbolt:a \\\n      \
        listen_address.trtype=TCP listen_address.traddr=127.0.0.1 listen_address.trsvcid=4420\n  \
    ringbolt rpc bdev_get_iostat --json '{\"names\":[\"Malloc0\"]}'\n\n\
    A value that parses as JSON (5, true, [1,2]) is JSON; any other is a string. Dots make nested objects.")]
pub(crate) struct Rpc {
    /// Method name
    #[arg(required_unless_present = "list")]
    pub(crate) method: Option<String>,
    /// Parameters
    #[arg(value_name = "KEY=VALUE")]
    pub(crate) parameters: Vec<String>,
    /// Parameters as one JSON object; KEY=VALUE overrides its members
    #[arg(long, value_name = "OBJECT")]
    pub(crate) json: Option<String>,
    /// List the methods of the server
    #[arg(long)]
    pub(crate) list: bool,
    /// UNIX socket of the server
    #[arg(short, long, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    pub(crate) rpc_socket: PathBuf,
    /// Seconds to wait for the response
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub(crate) timeout: u64,
}

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    ringbolt perf --filename=null:1g --rw=randread --bs=4k --iodepth=128 --time_based --runtime=5s\n  \
    ringbolt perf --filename=malloc:64m --rw=randwrite --verify --iodepth=16\n  \
    ringbolt perf --filename=uring:/tmp/disk.img --rw=randrw --rwmixread=70 --runtime=10s --time_based\n  \
    ringbolt perf --filename='nvme+tcp://127.0.0.1:4420/nqn.2025-01.io.ringbolt:a?ns=1' --rw=randread\n  \
    ringbolt perf -c bdevs.json --filename=Malloc0 --rw=read --output-format=json --output=out.json\n  \
    ringbolt perf --filename=/dev/nvme0n1 --ioengine=iou-s --direct=1 --rw=randread --iodepth=128 \\\n      \
        --fixedbufs --registerfiles --time_based --runtime=10s --norandommap\n  \
    ringbolt perf --filename=/dev/nvme0n1 --ioengine=libaio --rw=randread --rate_iops=50k \\\n      \
        --rate_process=poisson --time_based --runtime=10s\n  \
    ringbolt perf job.fio --output-format=json\n\n\
    Options, job files, units and JSON are fio's; an unsupported option is an error that names it. \
    Targets: files and devices through psync, pvsync2, libaio, io_uring (iou, iou-c, iou-s) or \
    io_uring_cmd, each job a process unless --thread; null:SIZE, malloc:SIZE, uring:PATH, aio:PATH, \
    model:PROFILE, nvme+tcp://HOST:PORT/NQN?ns=N and bdevs of -c FILE through ioengine=bdev, each job \
    on a reactor.")]
pub(crate) struct Perf {
    /// fio options, as --rw=randread, and job files; --cmdhelp lists the options
    #[arg(value_name = "OPTION|JOBFILE", trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) arguments: Vec<String>,
}

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    ringbolt demo            # serves until Ctrl-C, and prints how to connect a Linux host\n  \
    ringbolt demo --once     # exits after a few seconds")]
pub(crate) struct Demo {
    /// Exit when the measurement is done
    #[arg(long)]
    pub(crate) once: bool,
    /// Address to listen on; other machines reach any but a loopback address, without authentication
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub(crate) address: std::net::IpAddr,
    /// Duration of the load
    #[arg(long, default_value = "3s", value_parser = parse_time)]
    pub(crate) runtime: u64,
}

pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    workload::units::parse_bytes(text).ok_or_else(|| "expected a size, as 512, 4k or 1g".to_string())
}

pub(crate) fn parse_time(text: &str) -> Result<u64, String> {
    workload::units::parse_time_ns(text).ok_or_else(|| "expected a duration, as 10s, 500ms or 2m".to_string())
}

/// Whole milliseconds.
pub(crate) fn parse_ms(text: &str) -> Result<u32, String> {
    let ns = parse_time(text)?;
    u32::try_from(ns / 1_000_000)
        .ok()
        .filter(|ms| u64::from(*ms) * 1_000_000 == ns)
        .ok_or_else(|| "expected whole milliseconds, as 300ms".to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn clap_accepts_the_definition() {
        Cli::command().debug_assert();
    }

    /// clap wraps paragraphs at 100 columns, or where the terminal ends. Lines that are broken by hand besides become
    /// ragged.
    #[test]
    fn help_texts_are_wrapped_once() {
        let mut commands = vec![Cli::command()];
        let mut texts = 0;
        while let Some(command) = commands.pop() {
            let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            texts += usize::from(!text.is_empty());
            let lines: Vec<&str> = text.lines().collect();
            for (index, line) in lines.iter().enumerate() {
                let place = format!("{}: {line}", command.get_name());
                let is_prose =
                    |line: &str| !line.is_empty() && !line.starts_with(' ') && !line.starts_with("Example");
                assert!(is_prose(line) || line.chars().count() <= 100, "longer than 100 columns: {place}");
                let next = lines.get(index + 1).is_some_and(|next| is_prose(next));
                assert!(!is_prose(line) || !next, "a paragraph has a line break: {place}");
            }
            commands.extend(command.get_subcommands().cloned());
        }
        assert!(texts > 30, "{texts}");
    }

    #[test]
    fn help_names_every_front_end_by_methods_that_exist() {
        let mut command = Cli::command();
        let all = command.render_long_help().to_string();
        let serve = command.find_subcommand_mut("serve").map(|serve| serve.render_long_help().to_string());
        let serve = serve.unwrap_or_default();
        for front_end in ["NVMe", "TCP", "vfio-user", "iSCSI", "vhost-user", "SCSI", "NBD", "ublk"] {
            assert!(all.contains(front_end) && serve.contains(front_end), "{front_end}: {all}\n{serve}");
        }
        let catalog = crate::app::catalog();
        let mut methods = 0;
        for word in serve.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_') {
            if ["nvmf_", "iscsi_", "vhost_", "nbd_", "ublk_"].iter().any(|start| word.starts_with(start)) {
                assert!(catalog.get(word).is_some(), "{word} is no method");
                methods += 1;
            }
        }
        assert!(methods >= 12, "{methods} methods: {serve}");
    }

    #[test]
    fn the_index_of_documents_names_every_visible_command() {
        let index = include_str!("../../../docs/README.md");
        let command = Cli::command();
        for command in command.get_subcommands().filter(|command| !command.is_hide_set()) {
            let row = format!("\n| `ringbolt {}` |", command.get_name());
            assert!(index.contains(&row), "docs/README.md has no row for `ringbolt {}`", command.get_name());
        }
    }

    #[test]
    fn perf_passes_fio_options_through_unchanged() {
        let line = "ringbolt perf -c a.json --filename=null:1g --rw randrw --verify job.fio --eta=never";
        match Cli::try_parse_from(line.split_whitespace()).map(|cli| cli.command) {
            Ok(CliCommand::Perf(perf)) => {
                assert_eq!(perf.arguments.join(" "), &line["ringbolt perf ".len()..])
            }
            Ok(_) => panic!("{line} is not perf"),
            Err(error) => panic!("{line}: {error}"),
        }
    }
}
