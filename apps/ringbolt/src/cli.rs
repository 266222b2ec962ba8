//! The command line.

use clap::{CommandFactory, Parser, Subcommand};

use crate::command_error::CommandError;
use crate::commands::{
    blob, blobfs, demo, image, lab, lvol, model, nvme, nvmf, objects, perf, rpc, serve, store, trace,
};
use crate::console;

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
        3 invalid configuration; 4 the machine lacks a file, a permission or a kernel's feature;\n  \
        5 no server answers on the RPC socket."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: CliCommand,
}

#[derive(Subcommand)]
pub(crate) enum CliCommand {
    /// Serve block devices over NVMe (TCP, vfio-user), iSCSI, vhost-user (block, SCSI), NBD and ublk,
    /// configured by a file and by JSON-RPC
    Serve(serve::Serve),
    /// Call a JSON-RPC method of a running server
    Rpc(rpc::Rpc),
    /// Print a running server's recent I/O, event by event
    Trace(trace::Trace),
    /// Generate load on a device or a target with fio's options, and measure it
    Perf(Box<perf::Perf>),
    /// Serve a file over NVMe/TCP, generate load on it, and show IOPS, latency and CPU cost
    Demo(demo::Demo),
    /// Characterise this machine's I/O stacks and schedulers, report and compare results, and import fio's
    #[command(after_help = "Example:\n  ringbolt lab import fio-output.json --output-format=csv")]
    Lab {
        #[command(subcommand)]
        command: lab::LabCommand,
    },
    /// Bind NVMe controllers to user-space drivers, and inspect them
    #[command(after_help = "Example:\n  ringbolt nvme bind --status")]
    Nvme {
        #[command(subcommand)]
        command: nvme::NvmeCommand,
    },
    /// Set up a running NVMe target
    Nvmf {
        #[command(subcommand)]
        command: nvmf::NvmfCommand,
    },
    /// NVMe device models: list profiles, and compare them with published measurements
    #[command(after_help = "Examples:\n  ringbolt model list\n  ringbolt model fit samsung-980-pro\n  \
        ringbolt perf --filename=model:samsung-980-pro --rw=randread --iodepth=32 --runtime=5 --time_based")]
    Model {
        #[command(subcommand)]
        command: model::ModelCommand,
    },
    /// Create, list, resize and remove images, the thin volumes in a server's stores
    #[command(after_help = "Examples:\n  ringbolt image create vol 10g\n  ringbolt image list")]
    Image {
        #[command(subcommand)]
        command: image::ImageCommand,
    },
    /// Run a cluster of the replicated store on this machine, and show its state
    #[command(after_help = "Examples:\n  ringbolt store up\n  ringbolt store status\n  ringbolt store demo")]
    Store {
        #[command(subcommand)]
        command: store::StoreCommand,
    },
    /// Format, check and list the object store on a file or block device that no server uses
    #[command(
        after_help = "Examples:\n  ringbolt objects format --size=10g store.img\n  ringbolt objects check store.img\n  \
        ringbolt objects dump --json /dev/nvme0n1\n\n\
        A server opens it with bdev_uring_create and store_open; ringbolt image create makes a volume in it."
    )]
    Objects {
        #[command(subcommand)]
        command: objects::ObjectsCommand,
    },
    /// Create, list, snapshot, clone, resize and remove the logical volumes of a running server
    #[command(after_help = "Examples:\n  ringbolt lvol create --on nvme0n1 pool\n  \
        ringbolt lvol create --thin pool/vol 10g\n  ringbolt lvol snapshot pool/vol before-update\n  \
        ringbolt lvol list\n\nA store has its name, a volume that of its store and its own: STORE/VOLUME.")]
    Lvol {
        #[command(subcommand)]
        command: lvol::LvolCommand,
    },
    /// List, print, check and repair the blobstores of SPDK, with their logical volumes
    #[command(
        after_help = "Examples:\n  ringbolt blob list disk.img\n  ringbolt blob check /dev/nvme0n1\n  \
        ringbolt blob dump --json disk.img\n  ringbolt blob repair --apply disk.img\n\n\
        No program may have the file or device open for writing."
    )]
    Blob {
        #[command(subcommand)]
        command: blob::BlobCommand,
    },
    /// Format, list, read, write and check files on a blobstore, also those of SPDK's blobfs
    #[command(after_help = "Examples:\n  ringbolt blobfs format --size=10g files.img\n  \
        ringbolt blobfs cp files.img notes.txt :/notes.txt\n  ringbolt blobfs ls files.img\n  \
        ringbolt blobfs cat files.img /notes.txt\n\nNo other program may have the file or device open.")]
    Blobfs {
        #[command(subcommand)]
        command: blobfs::BlobFsCommand,
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

/// Runs a subcommand until it exits.
pub(crate) fn run(command: CliCommand) -> Result<(), CommandError> {
    match command {
        CliCommand::Serve(options) => serve::run(options),
        CliCommand::Rpc(options) => rpc::run(options),
        CliCommand::Perf(options) => perf::run(&options),
        CliCommand::Demo(options) => demo::run(&options),
        CliCommand::Lab { command } => lab::run(command),
        CliCommand::Lvol { command } => lvol::run(command),
        CliCommand::Model { command } => model::run(command),
        CliCommand::Blob { command } => blob::run(command),
        CliCommand::Blobfs { command } => blobfs::run(command),
        CliCommand::Objects { command } => objects::run(command),
        CliCommand::Image { command } => image::run(command),
        CliCommand::Store { command } => store::run(command),
        CliCommand::Nvme { command } => nvme::run(command),
        CliCommand::Nvmf { command } => nvmf::run(command),
        CliCommand::Trace(options) => trace::run(options),
        CliCommand::RpcReference { without_effect } => {
            let catalog = crate::app::catalog();
            let page = match without_effect {
                true => control::reference::without_effect(&catalog),
                false => control::reference::markdown(&catalog),
            };
            console::print(page);
            Ok(())
        }
        CliCommand::MetricsReference => {
            console::print(control::metrics::markdown(&crate::app::catalog()));
            Ok(())
        }
        CliCommand::Completions { shell } => {
            // In memory first: the generator panics where it cannot write.
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut visible_commands(), "ringbolt", &mut script);
            console::print(script);
            Ok(())
        }
    }
}

/// The command line without the subcommands that `--help` does not list.
fn visible_commands() -> clap::Command {
    let full = Cli::command();
    let visible = full.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    let command = clap::Command::new("ringbolt").version(env!("CARGO_PKG_VERSION"));
    command.args(full.get_arguments().cloned()).subcommands(visible)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clap_accepts_the_definition() {
        Cli::command().debug_assert();
    }

    /// clap wraps paragraphs at 100 columns, or where the terminal ends. Lines that are broken by hand
    /// besides become ragged.
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
