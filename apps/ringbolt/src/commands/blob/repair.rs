//! `ringbolt blob repair`: prints what can be repaired in a store, or repairs it.

use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use blobstore::{
    BlobStore, BlobStoreDevice, ChangeId, LoadOptions, OpenBlobStore, StoreAction, StoreEvent, StoreFinding,
    StoreIoFailed, StoreRepair, StoreSeverity,
};
use clap::Args;
use serde_json::{Value, json};

use super::{Image, finding_json, heading, owner, text};
use crate::command_error::CommandError;
use crate::console::stdout_line;

/// Bytes of zeroes that are written at once.
const ZEROES_BYTES_MAX: usize = 1 << 20;

/// Arguments of `ringbolt blob repair`.
#[derive(Args)]
pub(crate) struct RepairArgs {
    /// File or block device that has the store from its first byte
    #[arg(value_name = "IMAGE")]
    path: PathBuf,
    /// Make the repairs; without it, they are only printed
    #[arg(long)]
    apply: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(options: &RepairArgs) -> Result<(), CommandError> {
    let path = options.path.display();
    let image = Image::open(&options.path, options.apply)?;
    let (store, plan) = plan(&image)?;
    let mut left: Vec<StoreFinding> = plan.left().to_vec();
    let steps = plan.steps().to_vec();
    if options.apply {
        apply(&image, plan)?;
        let (_, again) = self::plan(&image)?;
        let undone = again.steps().iter().map(|step| step.finding().clone());
        left = again.left().iter().cloned().chain(undone).collect();
    }
    let problems = left.iter().filter(|finding| finding.severity() > StoreSeverity::Note).count();
    if options.json {
        let repairs = steps.iter().map(|step| {
            let mut members = finding_json(step.finding());
            members["repair"] = step.to_string().into();
            members
        });
        let members = json!({
            "type": store.super_block().store_type_text(),
            "name": text(owner(&store), "name"),
            "applied": options.apply,
            "repairs": repairs.collect::<Vec<Value>>(),
            "left": left.iter().map(finding_json).collect::<Vec<Value>>(),
            "problems": problems,
        });
        stdout_line!("{members:#}");
    } else {
        stdout_line!("{}", heading(&store));
        let what = if options.apply { "done" } else { "to do" };
        steps.iter().for_each(|step| stdout_line!("{what}: {step}"));
        left.iter().for_each(|finding| stdout_line!("left: {finding}"));
        match (options.apply, steps.len()) {
            (true, count) => stdout_line!("{count} repairs made, {problems} problems left"),
            (false, 0) => stdout_line!("there is nothing to repair, {problems} problems left"),
            (false, count) => {
                stdout_line!("{count} repairs to make with --apply, {problems} problems left then");
            }
        }
    }
    match problems {
        0 => Ok(()),
        count => Err(CommandError::operation(format!(
            "{path}: {count} problems cannot be repaired; copy what can be read to another store"
        ))),
    }
}

fn plan(image: &Image<'_>) -> Result<(BlobStore, StoreRepair), CommandError> {
    let load = |ignore_masks| image.load(LoadOptions { scan: true, ignore_masks });
    let store = load(false)?;
    let plan = StoreRepair::plan(store.clone(), load(true)?);
    Ok((store, plan))
}

fn apply(image: &Image<'_>, plan: StoreRepair) -> Result<(), CommandError> {
    let device = BlobStoreDevice {
        bytes: image.bytes,
        block_bytes: 512,
        has_volatile_cache: true,
        // What a power failure does to a page of the device is not known.
        atomic_write_bytes: 0,
    };
    let Some((open, change)) = plan.open(device) else { return Ok(()) };
    write(image, open, change).map_err(|why| {
        let path = image.path.display();
        CommandError::operation(format!("{path}: the repair ended before its end: {why}; it can be repeated"))
    })
}

/// Does what a repair asks for, one after another.
fn write(image: &Image<'_>, mut open: OpenBlobStore, change: ChangeId) -> Result<(), String> {
    let mut failure = None;
    loop {
        while let Some(event) = open.next_event() {
            match event {
                StoreEvent::Done { change: ended, result } if ended == change => {
                    return match (result, failure) {
                        (Ok(_), _) => Ok(()),
                        (Err(_), Some(io)) => Err(io),
                        (Err(error), None) => Err(error.to_string()),
                    };
                }
                StoreEvent::Published { epoch } => open.release(epoch),
                // No channel is there.
                StoreEvent::Pause { blob } => open.paused(blob),
                _ => {}
            }
        }
        let Some(io) = open.next_io() else { return Err("it waits for nothing".to_string()) };
        let done = act(image, &io.action).map_err(|error| {
            failure.get_or_insert(format!("{error}; the kernel's log says why"));
            StoreIoFailed
        });
        open.complete(io.id, done);
    }
}

fn act(image: &Image<'_>, action: &StoreAction) -> io::Result<()> {
    match action {
        StoreAction::Write { offset, data } => image.file.write_all_at(data, *offset),
        StoreAction::WriteZeroes { offset, bytes } => {
            let zeroes = vec![0; (*bytes).min(ZEROES_BYTES_MAX as u64) as usize];
            let (mut at, end) = (*offset, offset + bytes);
            while at < end {
                let part = (end - at).min(zeroes.len() as u64);
                image.file.write_all_at(&zeroes[..part as usize], at)?;
                at += part;
            }
            Ok(())
        }
        StoreAction::Flush => image.file.sync_data(),
        StoreAction::Deallocate { .. } => Ok(()),
        // A repair copies no data.
        StoreAction::Copy { .. } => Err(io::ErrorKind::Unsupported.into()),
    }
}
