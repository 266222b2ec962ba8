//! `ringbolt serve`: the NVMe, iSCSI, vhost-user, NBD and ublk targets.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use bdev::Registry;
use clap::Args;
use control::{ConfigFile, ControlPlane, Keyring, ListenSocket, RpcServer};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use vhost::VhostControllerInfo;

use crate::app::{self, App, StartOptions};
use crate::command_error::CommandError;
use crate::console::stdout_line;
use crate::options::{DEFAULT_SOCKET, ReactorOptions};
use crate::reactor_runtime::ReactorRuntime;

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    ringbolt serve -c target.json\n  \
    ringbolt serve --cores 2-3 --idle spin\n  \
    ringbolt serve -r /var/tmp/spdk.sock      # the default socket of SPDK's rpc.py\n  \
    ringbolt serve -S /run/vhost              # vhost-user sockets in this directory\n\n\
    Front ends, and the methods of `ringbolt rpc` that start them:\n  \
    NVMe over TCP       nvmf_create_transport trtype=TCP, nvmf_subsystem_add_listener\n  \
    NVMe over RDMA      nvmf_create_transport trtype=RDMA, nvmf_subsystem_add_listener\n  \
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
    /// Have other processes map the buffers of I/O, for devices behind vfio-user that calls name; a
    /// configuration file that names one does so by itself
    #[arg(long)]
    pub(crate) shared_memory: bool,
    /// End when standard input does: with the process that has the other end of the pipe
    #[arg(long, hide = true)]
    pub(crate) until_stdin_closes: bool,
    #[command(flatten)]
    pub(crate) reactor_options: ReactorOptions,
}

pub(crate) fn run(options: Serve) -> Result<(), CommandError> {
    // The configuration is checked before anything is started.
    control::logging::init_service();
    let catalog = app::catalog();
    let config = options.config.as_deref().map(|path| ConfigFile::read(path, &catalog)).transpose();
    let config = config.map_err(CommandError::config)?;
    // Before the reactors: every thread inherits the signal mask and handlers set here.
    let mut signals =
        Signals::new([SIGINT, SIGTERM, SIGQUIT, SIGHUP, SIGUSR1]).map_err(CommandError::environment)?;
    if options.until_stdin_closes {
        std::thread::spawn(|| {
            let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
            let _ = signal_hook::low_level::raise(SIGTERM);
        });
    }
    let shared = options.shared_memory || config.as_ref().is_some_and(app::needs_shared_memory);
    let runtime = ReactorRuntime::start_with(&options.reactor_options, options.cores.as_deref(), 1, shared)?;
    runtime.describe()?.iter().for_each(|line| stdout_line!("{line}"));
    let socket = ListenSocket::bind(&options.rpc_socket).map_err(CommandError::environment)?;

    let pending = options.wait_for_rpc.then(|| config.clone().unwrap_or_default());
    let keyring = Keyring::default();
    if let Some(folder) = &options.key_folder {
        keyring.set_folder(folder).map_err(CommandError::environment)?;
    }
    let vhost_socket_dir = options.vhost_socket_dir.unwrap_or_default();
    let start = StartOptions { pending, vhost_socket_dir, keyring };
    let registry = runtime.registry();
    if let Some(reason) = runtime.no_io_uring()? {
        registry.refuse_files(reason);
    }
    let app = App::start(registry, runtime.reactors()?, start).map_err(CommandError::environment)?;
    if let (Some(config), false) = (&config, options.wait_for_rpc) {
        config.apply(&app.control).map_err(|error| CommandError::config(error.message))?;
    }
    for subsystem in app.target().subsystems().iter().filter(|subsystem| !subsystem.discovery) {
        for listener in &subsystem.listeners {
            stdout_line!(
                "listening: {} {}:{} {}",
                listener.trtype,
                listener.traddr,
                listener.trsvcid,
                subsystem.nqn
            );
        }
    }
    for export in app.nbd().configured() {
        stdout_line!("listening: NBD {}", export.uri());
    }
    for uri in app.iscsi().uris() {
        stdout_line!("listening: iSCSI {uri}");
    }
    for controller in app.vhost().configured().into_iter().filter(VhostControllerInfo::is_listening) {
        stdout_line!("listening: vhost-user {}", controller.socket.display());
    }
    stdout_line!("rpc: {}", options.rpc_socket.display());
    let server = RpcServer::start(app.control.clone(), socket).map_err(CommandError::environment)?;
    stdout_line!("ready");

    let reloads = start_reloader(options.config.clone(), config, &app.control)?;
    let name = loop {
        let Some(signal) = signals.forever().next() else { break "stopped" };
        match signal {
            // One that waits covers those that come meanwhile.
            SIGHUP => _ = reloads.try_send(()),
            SIGUSR1 => print_state(&app.control),
            signal => break signal_hook::low_level::signal_name(signal).unwrap_or("stopped"),
        }
    };
    stdout_line!("{name}: completing I/O in flight");
    let progress = StopProgress::start(app.registry.clone())?;
    drop(server);
    // Connections first: each closes after its commands in flight have completed, and releases its bdevs.
    app.control.drain();
    runtime.reactors.stop();
    app.control.stop();
    drop(progress);
    Ok(())
}

/// Prints what is waited for while the program stops, until its drop.
struct StopProgress {
    /// Its drop ends the thread.
    ended: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl StopProgress {
    const INTERVAL: Duration = Duration::from_secs(2);

    fn start(registry: Registry) -> Result<StopProgress, CommandError> {
        let (sender, ended) = sync_channel(1);
        let run = move || {
            while ended.recv_timeout(StopProgress::INTERVAL) == Err(RecvTimeoutError::Timeout) {
                let open = open_bdevs(&registry);
                if !open.is_empty() {
                    stdout_line!("waiting for I/O of {}", open.join(", "));
                }
            }
        };
        let thread = std::thread::Builder::new().name("stop".to_string()).spawn(run);
        let thread = thread.map_err(CommandError::environment)?;
        Ok(StopProgress { ended: Some(sender), thread: Some(thread) })
    }
}

impl Drop for StopProgress {
    fn drop(&mut self) {
        drop(self.ended.take());
        // Fails only if it panicked, which was reported.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// The bdevs that are still open. One with a claim is open because of a bdev on it, which is named instead.
fn open_bdevs(registry: &Registry) -> Vec<String> {
    let open: Vec<_> = registry.list().into_iter().filter(|device| device.open_count() > 0).collect();
    let has_unclaimed = open.iter().any(|device| device.claim().is_none());
    let named = open.iter().filter(|device| !has_unclaimed || device.claim().is_none());
    named.map(|device| device.name().to_string()).collect()
}

/// Starts the thread that reads the configuration again at each message, and applies what differs. It has a
/// thread of its own because a call may take long: the program ends nevertheless.
fn start_reloader(
    path: Option<PathBuf>,
    config: Option<ConfigFile>,
    control: &Arc<ControlPlane>,
) -> Result<SyncSender<()>, CommandError> {
    let (sender, requests) = sync_channel(1);
    let (control, mut in_force) = (control.clone(), config.unwrap_or_default());
    let run = move || {
        for () in requests {
            let Some(path) = &path else {
                stdout_line!("reload: there is no configuration file (--config)");
                continue;
            };
            match ConfigFile::read_again(path, control.catalog()) {
                Ok(new) => {
                    let (now, lines) = in_force.reload(&new, &control);
                    in_force = now;
                    lines.iter().for_each(|line| stdout_line!("reload: {line}"));
                }
                Err(error) => stdout_line!("reload: nothing is changed: {error}"),
            }
            stdout_line!("reload: done");
        }
    };
    std::thread::Builder::new().name("reload".to_string()).spawn(run).map_err(CommandError::environment)?;
    Ok(sender)
}

/// Prints what the modules report, and the times of the reactors.
fn print_state(control: &ControlPlane) {
    for method in ["framework_get_modules", "framework_get_reactors", "job_get"] {
        match control.invoke(method, control::json::Value::Null) {
            Ok(control::json::Value::Array(entries)) => {
                let reports =
                    entries.iter().filter(|entry| !entry["report"].is_null() || method == "job_get");
                reports.for_each(|entry| stdout_line!("state: {entry}"));
            }
            Ok(state) => stdout_line!("state: {state}"),
            Err(error) => stdout_line!("state: {method}: {error}"),
        }
    }
}
