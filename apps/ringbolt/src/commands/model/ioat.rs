//! `ringbolt model ioat`: serves the software model of an I/OAT DMA engine.

use std::path::PathBuf;

use clap::Args;
use ioat_model::{IoatFault, IoatModel, IoatServer};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::command_error::CommandError;
use crate::console::stdout_line;

pub(super) const HELP: &str = "Examples:\n  \
    ringbolt model ioat /run/ioat0\n  \
    ringbolt model ioat /run/ioat0 /run/ioat1                 # two functions, for two cores\n  \
    ringbolt model ioat /run/ioat0 --fault halt-every=1000\n  \
    ringbolt rpc ioat_scan_accel_module addresses='[\"vfio-user:/run/ioat0\"]'\n\n\
    Faults: halt-every=N, partial-every=N (half of the data, then an error), stall-after=N (until a reset), \
    stop-after=N, backward-after=N (an older status), forge-after=N:WORD (0x…), no-suspend, no-reset. \
    N counts descriptors. The server of a device behind vfio-user needs buffers that it can map: \
    ringbolt serve --shared-memory. It ends with SIGINT and SIGTERM.";

#[derive(Args)]
pub(crate) struct IoatArgs {
    /// Sockets, one for each function
    #[arg(value_name = "SOCKET", required = true)]
    sockets: Vec<PathBuf>,
    /// What the functions do wrong; may be repeated
    #[arg(long = "fault", value_name = "FAULT")]
    faults: Vec<IoatFault>,
}

pub(super) fn run(options: IoatArgs) -> Result<(), CommandError> {
    control::logging::init();
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(CommandError::environment)?;
    let mut stops = Vec::new();
    let mut threads = Vec::new();
    for path in &options.sockets {
        let mut model = IoatModel::new();
        options.faults.iter().for_each(|fault| model.inject(*fault));
        let failed =
            |error: std::io::Error| CommandError::environment(format!("{}: {error}", path.display()));
        let server = IoatServer::bind(path, model).map_err(failed)?;
        let stop = server.stop_handle();
        stops.push(stop.clone());
        let (name, ended) = (path.display().to_string(), signals.handle());
        threads.push(std::thread::spawn(move || {
            let result = server.run().map_err(|error| CommandError::environment(format!("{name}: {error}")));
            // One that ends ends all.
            ended.close();
            result
        }));
        stdout_line!("listening: I/OAT vfio-user:{}", path.display());
    }
    // Until a signal arrives, or a server has failed.
    let _ = signals.forever().next();
    stops.iter().for_each(ioat_model::StopHandle::stop);
    for thread in threads {
        match thread.join() {
            Ok(Ok(model)) => stdout_line!("{} descriptors were executed", model.executed_total()),
            Ok(Err(error)) => return Err(error),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
    Ok(())
}
