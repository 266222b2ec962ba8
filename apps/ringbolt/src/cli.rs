//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Block storage on rings: an NVMe/TCP target, its RPC client, a load generator, a demonstration.
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
        Exit status: 0 well; 1 an I/O, a check of data or a method failed; 2 wrong command line;\n  \
        3 wrong configuration; 4 the machine lacks something; 5 nobody answers on the RPC socket."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Serve devices over NVMe/TCP, configured by a file and by JSON-RPC
    Serve(Serve),
    /// Call a JSON-RPC method of a running server
    Rpc(Rpc),
    /// Drive a device or a target with fio's options, and measure it
    Perf(Box<Perf>),
    /// Serve a file, drive it over NVMe/TCP, and show what that costs
    Demo(Demo),
    /// Characterise this machine's I/O stacks, and read what others measured
    #[command(after_help = "Example:\n  ringbolt lab import fio-output.json --output-format=csv")]
    Lab {
        #[command(subcommand)]
        command: crate::commands::lab::Lab,
    },
    /// Take NVMe controllers from the kernel, and look into them
    #[command(after_help = "Example:\n  ringbolt nvme bind --status")]
    Nvme {
        #[command(subcommand)]
        command: crate::commands::nvme::Nvme,
    },
    /// NVMe devices made of software: profiles, and how well they meet what was published
    #[command(after_help = "Examples:\n  ringbolt model list\n  ringbolt model fit samsung-980-pro\n  \
        ringbolt perf --filename=model:samsung-980-pro --rw=randread --iodepth=32 --runtime=5s --time_based")]
    Model {
        #[command(subcommand)]
        command: crate::commands::model::Model,
    },
    /// Print a completion script for a shell
    #[command(after_help = "Example:\n  ringbolt completions bash > /etc/bash_completion.d/ringbolt")]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// What every command that starts reactors takes.
#[derive(Args)]
pub(crate) struct Machine {
    /// What a reactor without work does
    #[arg(long, value_enum, default_value = "adaptive")]
    pub(crate) idle: Idle,
    /// Most memory for I/O buffers, as 512m or 1g
    #[arg(long, value_name = "SIZE", default_value = "1g")]
    pub(crate) memory: String,
    /// What to ask the kernel with
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) engine: EngineChoice,
}

#[derive(Clone, Copy, Default, ValueEnum)]
pub(crate) enum EngineChoice {
    /// io_uring where it is allowed, otherwise epoll
    #[default]
    Auto,
    /// io_uring, or not at all
    Uring,
    /// epoll: sockets only, no bdev_uring
    Epoll,
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Idle {
    /// Look again for 100 us, then sleep until there is work
    Adaptive,
    /// Always look again: lowest latency, a whole core each
    Spin,
    /// Sleep at once
    Sleep,
}

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    ringbolt serve -c target.json\n  \
    ringbolt serve --cores 2-3 --idle spin\n  \
    ringbolt serve -r /var/tmp/spdk.sock      # where SPDK's rpc.py looks\n\n\
    The file is SPDK's: {\"subsystems\":[{\"subsystem\":\"bdev\",\"config\":[{\"method\":…,\"params\":…}]}]}.\n\
    `ringbolt rpc save_config` writes one. SIGINT and SIGTERM end the server once what is in flight is done.")]
pub(crate) struct Serve {
    /// SPDK JSON configuration file
    #[arg(short, long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// UNIX socket of the JSON-RPC server
    #[arg(short, long, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    pub(crate) rpc_socket: PathBuf,
    /// Cores to run on, one pinned reactor each, as 0-3,5 or 0x2f; by default one reactor, not pinned
    #[arg(long, short = 'm', value_name = "LIST")]
    pub(crate) cores: Option<String>,
    /// Apply the file only when framework_start_init is called
    #[arg(long)]
    pub(crate) wait_for_rpc: bool,
    #[command(flatten)]
    pub(crate) machine: Machine,
}

pub(crate) const DEFAULT_SOCKET: &str = "/var/tmp/ringbolt.sock";

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    ringbolt rpc --list\n  \
    ringbolt rpc bdev_malloc_create name=Malloc0 num_blocks=131072 block_size=512\n  \
    ringbolt rpc nvmf_subsystem_add_listener nqn=nqn.2025-01.io.ringbolt:a \\\n      \
        listen_address.trtype=TCP listen_address.traddr=127.0.0.1 listen_address.trsvcid=4420\n  \
    ringbolt rpc bdev_get_iostat --json '{\"names\":[\"Malloc0\"]}'\n\n\
    A value is JSON where it is JSON (5, true, [1,2]) and text otherwise. Dots make nested objects.")]
pub(crate) struct Rpc {
    /// The method
    #[arg(required_unless_present = "list")]
    pub(crate) method: Option<String>,
    /// Parameters
    #[arg(value_name = "KEY=VALUE")]
    pub(crate) parameters: Vec<String>,
    /// Parameters as one JSON object; KEY=VALUE changes it
    #[arg(long, value_name = "OBJECT")]
    pub(crate) json: Option<String>,
    /// List the methods of the server
    #[arg(long)]
    pub(crate) list: bool,
    /// UNIX socket of the server
    #[arg(short, long, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    pub(crate) rpc_socket: PathBuf,
    /// Seconds to wait for the answer
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
    ringbolt perf --filename=/dev/nvme0n1 --ioengine=libaio --rw=randread --rate_iops=50k --rate_process=poisson \\\n      \
        --time_based --runtime=10s\n  \
    ringbolt perf job.fio --output-format=json\n\n\
    Options, job files, units and JSON are fio's; what is not supported is refused by name. What is driven:\n\
    files and devices through psync, pvsync2, libaio, io_uring (iou, iou-c, iou-s) or io_uring_cmd, each job\n\
    a process unless --thread; null:SIZE, malloc:SIZE, uring:PATH, model:PROFILE,\n\
    nvme+tcp://HOST:PORT/NQN?ns=N and bdevs of -c FILE through ioengine=bdev, each job on a reactor.")]
pub(crate) struct Perf {
    /// fio's options, as --rw=randread, and job files; --cmdhelp lists the options
    #[arg(value_name = "OPTION|JOBFILE", trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) words: Vec<String>,
}

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    ringbolt demo            # serves until Ctrl-C, with a line to connect a Linux host\n  \
    ringbolt demo --once     # ends by itself in a few seconds")]
pub(crate) struct Demo {
    /// End when the measurement is done
    #[arg(long)]
    pub(crate) once: bool,
    /// Address to serve on; hosts elsewhere reach any but a loopback one, and nothing keeps them out
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub(crate) address: std::net::IpAddr,
    /// How long to drive the target
    #[arg(long, default_value = "3s", value_parser = time)]
    pub(crate) runtime: u64,
}

pub(crate) fn size(text: &str) -> Result<u64, String> {
    workload::units::parse_bytes(text).ok_or_else(|| "it is a number, as 512, 4k or 1g".to_string())
}

pub(crate) fn time(text: &str) -> Result<u64, String> {
    workload::units::parse_time_ns(text).ok_or_else(|| "it is a time, as 10s, 500ms or 2m".to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_holds_together() {
        Cli::command().debug_assert();
    }

    #[test]
    fn perf_takes_fios_words_as_they_are() {
        let line = "ringbolt perf -c a.json --filename=null:1g --rw randrw --verify job.fio --eta=never";
        match Cli::try_parse_from(line.split_whitespace()).map(|cli| cli.command) {
            Ok(Command::Perf(perf)) => assert_eq!(perf.words.join(" "), &line["ringbolt perf ".len()..]),
            Ok(_) => panic!("{line} is not perf"),
            Err(error) => panic!("{line}: {error}"),
        }
    }
}
