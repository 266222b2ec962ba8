//! A bdev of a configuration file that a store is on: `--config`.
//!
//! A reactor of this process has the bdevs of the file. The commands' threads wait for each I/O, which a
//! poller on the reactor runs.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};

use bdev::stacking::BaseBdev;
use bdev::{Access, PlanRunner, PlannedAction, PlannedIo, PlannedOutcome, Planner};
use blobfs::{BlobFsAction, BlockingDevice};
use blobstore::BlobStoreDevice;
use control::{ConfigFile, json::Value};
use reactor::{Core, MailboxReceiver, MailboxSender, Period, PollResult, Poller, Shutdown, blocking};

use crate::app::{self, App, StartOptions};
use crate::command_error::CommandError;
use crate::options::{EngineChoice, Idle, ReactorOptions};
use crate::reactor_runtime::ReactorRuntime;

/// Who claims the bdev.
const HOLDER: &str = "ringbolt blobfs";
/// Bytes of the largest block of a bdev: a page of metadata.
const BLOCK_BYTES_MAX: u32 = 4096;
/// Bytes of one I/O: what a pool has at a time.
const IO_BYTES_MAX: usize = 1 << 20;
/// Messages for the poller: one thread at a time has the device, and waits for each I/O.
const MESSAGES_MAX: usize = 2;

/// The data of a read, or nothing.
type DeviceReply = SyncSender<Result<Vec<u8>, io::Error>>;

enum DeviceMessage {
    Io(BlobFsAction, DeviceReply),
    /// Close the channel.
    End(DeviceReply),
}

/// A bdev with the program that has it. Its drop ends both.
pub(super) struct BdevDevice {
    sender: MailboxSender<DeviceMessage>,
    properties: BlobStoreDevice,
    base: Arc<BaseBdev>,
    app: App,
    /// Until the drop.
    reactors: Option<ReactorRuntime>,
}

impl BdevDevice {
    /// Makes the bdevs of a file, and opens one of them, for changes or for reading.
    pub(super) fn open(config: &Path, name: &str, is_changed: bool) -> Result<BdevDevice, CommandError> {
        let options = ReactorOptions { idle: Idle::Adaptive, memory: None, engine: EngineChoice::Auto };
        let config = ConfigFile::read(config, &app::catalog()).map_err(CommandError::config)?;
        let reactors = ReactorRuntime::start_with(&options, None, 1, app::needs_shared_memory(&config))?;
        let registry = reactors.registry();
        if let Some(refusal) = reactors.no_io_uring()? {
            registry.refuse_files(refusal);
        }
        control::logging::init();
        // Notices are for the log of a service.
        log::set_max_level(log::LevelFilter::Warn);
        let app = App::start(registry.clone(), reactors.reactors()?, StartOptions::default())
            .map_err(CommandError::environment)?;
        let opened = apply(&config, &app).and_then(|()| open_base(&app, &reactors, name, is_changed));
        match opened {
            Ok((base, sender)) => {
                let properties = lvol::blob_store_device(&base);
                Ok(BdevDevice { sender, properties, base, app, reactors: Some(reactors) })
            }
            Err(error) => {
                stop(&app, reactors);
                Err(error)
            }
        }
    }

    fn run(&self, action: BlobFsAction) -> io::Result<Vec<u8>> {
        let (reply, result) = sync_channel(1);
        // A message that is returned drops the reply.
        _ = self.sender.send(DeviceMessage::Io(action, reply));
        blocking::receive(&result).unwrap_or_else(|_| Err(io::Error::other("the reactor has ended")))
    }
}

fn apply(config: &ConfigFile, app: &App) -> Result<(), CommandError> {
    config.apply(&app.control).map_err(|error| CommandError::config(error.message))?;
    let examined = app.control.invoke("bdev_wait_for_examine", Value::Null);
    examined.map(drop).map_err(|error| CommandError::environment(error.message))
}

fn open_base(
    app: &App,
    reactors: &ReactorRuntime,
    name: &str,
    is_changed: bool,
) -> Result<(Arc<BaseBdev>, MailboxSender<DeviceMessage>), CommandError> {
    if app.registry.find(name).is_none() {
        let names: Vec<String> = app.registry.list().iter().map(|device| device.name().to_string()).collect();
        let there = if names.is_empty() { "no bdevs".to_string() } else { names.join(", ") };
        return Err(CommandError::environment(format!(
            "the configuration makes no bdev {name}; it makes {there}"
        )));
    }
    let access = match is_changed {
        true => Access::Exclusive { by: HOLDER },
        false => Access::ReadManyWriteNone { by: HOLDER },
    };
    let base = BaseBdev::open(&app.registry, name, access).map_err(CommandError::environment)?;
    let block_bytes = base.device().geometry().block_size;
    if !BLOCK_BYTES_MAX.is_multiple_of(block_bytes) {
        return Err(CommandError::environment(format!(
            "{name}: its blocks have {block_bytes} bytes, and a store needs 512 or 4096"
        )));
    }
    let base = Arc::new(base);
    let reactor = reactors.handles().first().ok_or_else(|| CommandError::environment("no reactor runs"))?;
    let of_core = base.clone();
    let started =
        reactor.call(move |core| start_poller(core, &of_core)).map_err(CommandError::environment)?;
    Ok((base, started.map_err(CommandError::environment)?))
}

fn stop(app: &App, reactors: ReactorRuntime) {
    app.control.drain();
    reactors.reactors.stop();
    app.control.stop();
}

impl Drop for BdevDevice {
    fn drop(&mut self) {
        let (reply, ended) = sync_channel(1);
        _ = self.sender.send(DeviceMessage::End(reply));
        // Without a reactor the channel has ended.
        _ = blocking::receive(&ended);
        self.base.release();
        if let Some(reactors) = self.reactors.take() {
            stop(&self.app, reactors);
        }
    }
}

impl BlockingDevice for BdevDevice {
    fn properties(&self) -> BlobStoreDevice {
        self.properties
    }

    fn read(&mut self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let mut offset = offset;
        for part in out.chunks_mut(IO_BYTES_MAX) {
            let data = self.run(BlobFsAction::Read { offset, bytes: part.len() })?;
            part.copy_from_slice(&data);
            offset += part.len() as u64;
        }
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut offset = offset;
        for part in data.chunks(IO_BYTES_MAX) {
            self.run(BlobFsAction::Write { offset, data: part.to_vec(), durable: false })?;
            offset += part.len() as u64;
        }
        Ok(())
    }

    fn write_zeroes(&mut self, offset: u64, bytes: u64) -> io::Result<()> {
        self.run(BlobFsAction::WriteZeroes { offset, bytes }).map(drop)
    }

    fn deallocate(&mut self, offset: u64, bytes: u64) -> io::Result<()> {
        self.run(BlobFsAction::Deallocate { offset, bytes }).map(drop)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.run(BlobFsAction::Flush).map(drop)
    }
}

/// I/O that threads wait for.
#[derive(Default)]
struct DevicePlan {
    ready: VecDeque<PlannedIo>,
    replies: HashMap<u64, DeviceReply>,
    next_id: u64,
}

impl Planner for DevicePlan {
    fn next_io(&mut self) -> Option<PlannedIo> {
        self.ready.pop_front()
    }

    fn complete(&mut self, id: u64, outcome: PlannedOutcome) {
        let Some(reply) = self.replies.remove(&id) else { return };
        let result = outcome.map(|data| {
            let mut bytes = vec![0; data.as_ref().map_or(0, |data| data.len())];
            if let Some(data) = data {
                data.copy_to(0, &mut bytes);
            }
            bytes
        });
        // The thread that waits has gone only if the process ends.
        _ = reply.send(result.map_err(|status| io::Error::from_raw_os_error(status.to_errno().0)));
    }
}

fn planned(action: BlobFsAction) -> PlannedAction {
    match action {
        BlobFsAction::Read { offset, bytes } => PlannedAction::Read { offset, bytes },
        BlobFsAction::Write { offset, data, durable } => {
            PlannedAction::Write { offset, data: data.into(), durable }
        }
        BlobFsAction::WriteZeroes { offset, bytes } => PlannedAction::WriteZeroes { offset, bytes },
        BlobFsAction::Deallocate { offset, bytes } => PlannedAction::Deallocate { offset, bytes },
        BlobFsAction::Flush => PlannedAction::Flush,
    }
}

struct DevicePoller {
    runner: PlanRunner,
    plan: DevicePlan,
    messages: MailboxReceiver<DeviceMessage>,
    end: Option<DeviceReply>,
}

fn start_poller(core: &Core, base: &BaseBdev) -> Result<MailboxSender<DeviceMessage>, bdev::BdevError> {
    let runner = PlanRunner::new(core, base.channel(core)?);
    let (sender, messages) = core.mailbox(MESSAGES_MAX);
    let poller = DevicePoller { runner, plan: DevicePlan::default(), messages, end: None };
    core.add_poller(Box::new(poller), Period::EveryTurn);
    Ok(sender)
}

impl Poller for DevicePoller {
    fn name(&self) -> &str {
        "blobfs device"
    }

    fn poll(&mut self, _now_ns: u64) -> PollResult {
        let mut count = 0;
        while let Some(message) = self.messages.receive() {
            count += 1;
            match message {
                DeviceMessage::Io(action, reply) => {
                    let id = self.plan.next_id;
                    self.plan.next_id += 1;
                    self.plan.replies.insert(id, reply);
                    self.plan.ready.push_back(PlannedIo { id, action: planned(action) });
                }
                DeviceMessage::End(reply) => self.end = Some(reply),
            }
        }
        count += self.runner.turn(&mut self.plan);
        if self.end.is_some() && self.runner.is_idle() {
            return PollResult::Finished;
        }
        PollResult::from_count(count)
    }

    fn deadline(&self) -> Option<u64> {
        if !self.messages.is_empty() {
            return Some(0);
        }
        self.runner.deadline()
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        if self.runner.is_idle() { Shutdown::Done } else { Shutdown::Draining }
    }
}
