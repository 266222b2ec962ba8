//! Reports files that are deleted while bdevs use them. Such a bdev serves on, but its contents are lost when it is closed.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::inotify;
use rustix::io::Errno;

use crate::BlockDevice;
use crate::uring::UringBdev;

type Report = Box<dyn Fn(&BlockDevice) + Send + Sync>;

/// Watches the files of bdevs (inotify(7)) and reports each that is deleted, once, on a thread. The thread starts with the
/// first file and ends when this is dropped. Deletions by other hosts of a network file system are not seen.
pub(super) struct BackingFileWatch {
    report: Arc<Report>,
    state: Mutex<WatchState>,
}

enum WatchState {
    /// There was no file yet.
    Idle,
    Running(Arc<WatchThread>),
    /// The kernel has no more inotify instances or threads.
    Failed,
}

struct WatchThread {
    inotify: OwnedFd,
    /// An eventfd that ends the thread.
    stop: OwnedFd,
    /// Bdevs by the watch of their file, at most one each.
    watches: Mutex<HashMap<i32, Weak<BlockDevice>>>,
}

impl BackingFileWatch {
    /// `report` is called with each bdev whose file was deleted.
    pub(super) fn new(report: impl Fn(&BlockDevice) + Send + Sync + 'static) -> BackingFileWatch {
        BackingFileWatch { report: Arc::new(Box::new(report)), state: Mutex::new(WatchState::Idle) }
    }

    /// Watches the file of a bdev, if it has one.
    pub(super) fn add(&self, device: &Arc<BlockDevice>) {
        let Some(file) = device.module::<UringBdev>().and_then(UringBdev::regular_file) else { return };
        let mut state = sync::lock(&self.state);
        if let WatchState::Idle = *state {
            *state = match WatchThread::start(&self.report) {
                Ok(thread) => WatchState::Running(thread),
                Err(error) => {
                    log::warn!(target: "bdev", "deleted files are not reported as notifications: {error}");
                    WatchState::Failed
                }
            };
        }
        let WatchState::Running(thread) = &*state else { return };
        // This link leads to the open file, whatever its path names by now.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        match inotify::add_watch(&thread.inotify, path, inotify::WatchFlags::ATTRIB) {
            Ok(watch) => {
                sync::lock(&thread.watches).insert(watch, Arc::downgrade(device));
                // It may have been deleted before.
                thread.check(watch, &**self.report);
            }
            Err(error) => {
                let name = device.name();
                log::warn!(target: "bdev", "the deletion of the file of {name} will not be reported as a notification: {error}");
            }
        }
    }

    /// Ends the watch of a bdev that is removed.
    pub(super) fn remove(&self, device: &Arc<BlockDevice>) {
        if device.module::<UringBdev>().is_none() {
            return;
        }
        let WatchState::Running(thread) = &*sync::lock(&self.state) else { return };
        let is_its =
            |_: &i32, watched: &mut Weak<BlockDevice>| std::ptr::eq(watched.as_ptr(), Arc::as_ptr(device));
        let removed: Vec<i32> =
            sync::lock(&thread.watches).extract_if(is_its).map(|(watch, _)| watch).collect();
        for watch in removed {
            thread.end(watch);
        }
    }
}

impl Drop for BackingFileWatch {
    fn drop(&mut self) {
        if let WatchState::Running(thread) = &*sync::lock(&self.state) {
            // An eventfd that nothing else writes takes one.
            _ = rustix::io::write(&thread.stop, &1u64.to_ne_bytes());
        }
    }
}

impl WatchThread {
    fn start(report: &Arc<Report>) -> std::io::Result<Arc<WatchThread>> {
        let thread = Arc::new(WatchThread {
            inotify: inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?,
            stop: eventfd(0, EventfdFlags::CLOEXEC)?,
            watches: Mutex::default(),
        });
        let (own, report) = (thread.clone(), report.clone());
        std::thread::Builder::new().name("backing-files".to_string()).spawn(move || own.run(&**report))?;
        Ok(thread)
    }

    fn run(&self, report: &dyn Fn(&BlockDevice)) {
        loop {
            let mut ready =
                [PollFd::new(&self.inotify, PollFlags::IN), PollFd::new(&self.stop, PollFlags::IN)];
            match poll(&mut ready, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    return log::warn!(target: "bdev", "deleted files are not reported any more: {error}");
                }
            }
            if !ready[1].revents().is_empty() {
                return;
            }
            let mut buffer = [MaybeUninit::uninit(); 4096];
            let mut events = inotify::Reader::new(&self.inotify, &mut buffer);
            // Until there are no more; a lost event (IN_Q_OVERFLOW) has the watch -1.
            while let Ok(event) = events.next() {
                if event.events().contains(inotify::ReadFlags::QUEUE_OVERFLOW) {
                    let all: Vec<i32> = sync::lock(&self.watches).keys().copied().collect();
                    all.into_iter().for_each(|watch| self.check(watch, report));
                }
                self.check(event.wd(), report);
            }
        }
    }

    /// Reports the bdev of a watch if its file is deleted, and ends the watch then.
    fn check(&self, watch: i32, report: &dyn Fn(&BlockDevice)) {
        let mut watches = sync::lock(&self.watches);
        let Some(device) = watches.get(&watch).and_then(Weak::upgrade) else { return };
        if !device.module::<UringBdev>().is_some_and(UringBdev::is_file_deleted) {
            return;
        }
        watches.remove(&watch);
        drop(watches);
        self.end(watch);
        report(&device);
    }

    fn end(&self, watch: i32) {
        // An error means that the file system is unmounted, which ends it too.
        _ = inotify::remove_watch(&self.inotify, watch);
    }
}
