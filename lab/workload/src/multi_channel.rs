//! Several channels as one: a request's `flow` is the index of its channel.

use block_io::{Channel, Completion, Request};
use dma::Data;

use crate::poller::DynChannel;

/// The channels of a job with several files.
pub(crate) struct MultiChannel {
    files: Vec<FileChannel>,
}

struct FileChannel {
    channel: Box<DynChannel>,
    /// Requests deferred until the channel has room.
    deferred: Vec<Request<Data>>,
}

impl MultiChannel {
    pub(crate) fn new(channels: Vec<Box<DynChannel>>) -> MultiChannel {
        MultiChannel {
            files: channels
                .into_iter()
                .map(|channel| FileChannel { channel, deferred: Vec::new() })
                .collect(),
        }
    }
}

impl Channel for MultiChannel {
    type Request = Request<Data>;
    type Completion = Completion<Data>;

    /// Accepts every request; those for a full channel are deferred here, so that they do not block the others.
    fn submit(&mut self, batch: &mut Vec<Request<Data>>) {
        for request in batch.drain(..) {
            self.files[request.flow as usize].deferred.push(request);
        }
        for file in self.files.iter_mut().filter(|file| !file.deferred.is_empty()) {
            file.channel.submit(&mut file.deferred);
        }
    }

    fn poll(&mut self, sink: &mut Vec<Completion<Data>>) -> usize {
        let mut count = 0;
        for file in &mut self.files {
            count += file.channel.poll(sink);
            if !file.deferred.is_empty() {
                file.channel.submit(&mut file.deferred);
            }
        }
        count
    }

    fn deadline(&self) -> Option<u64> {
        let has_deferred = self.files.iter().any(|file| !file.deferred.is_empty());
        let own = has_deferred.then_some(0);
        self.files.iter().filter_map(|file| file.channel.deadline()).chain(own).min()
    }
}
