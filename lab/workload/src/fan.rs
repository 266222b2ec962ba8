//! Several channels as one: a request's `flow` is the channel that it goes to.

use memory::Buffer;
use ring::{Channel, Completion, Request};

use crate::poller::DynChannel;

/// The files of a job that has several.
pub(crate) struct Fan {
    lanes: Vec<Lane>,
}

struct Lane {
    channel: Box<DynChannel>,
    /// What waits for room in the channel.
    batch: Vec<Request<Buffer>>,
}

impl Fan {
    pub(crate) fn new(channels: Vec<Box<DynChannel>>) -> Fan {
        Fan { lanes: channels.into_iter().map(|channel| Lane { channel, batch: Vec::new() }).collect() }
    }
}

impl Channel for Fan {
    type Request = Request<Buffer>;
    type Completion = Completion<Buffer>;

    /// Takes all: what does not fit a full channel waits here, so that it does not stop the others.
    fn submit(&mut self, batch: &mut Vec<Request<Buffer>>) {
        for request in batch.drain(..) {
            self.lanes[request.flow as usize].batch.push(request);
        }
        for lane in self.lanes.iter_mut().filter(|lane| !lane.batch.is_empty()) {
            lane.channel.submit(&mut lane.batch);
        }
    }

    fn poll(&mut self, sink: &mut Vec<Completion<Buffer>>) -> usize {
        let mut count = 0;
        for lane in &mut self.lanes {
            count += lane.channel.poll(sink);
            if !lane.batch.is_empty() {
                lane.channel.submit(&mut lane.batch);
            }
        }
        count
    }

    fn deadline(&self) -> Option<u64> {
        let waiting = self.lanes.iter().any(|lane| !lane.batch.is_empty());
        let own = waiting.then_some(0);
        self.lanes.iter().filter_map(|lane| lane.channel.deadline()).chain(own).min()
    }
}
