//! The changes of a cluster's keys, as etcd streams them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::client::{ANSWER_TIME, EtcdClient};
use super::connection::{HttpConnection, HttpError};
use super::messages::{StreamLine, WatchAnswer, WatchEvent, base64, end_of_prefix};
use crate::{GroupId, MapChange, MapChanges, MapError};

/// A stream is opened anew after this time, so that an endpoint that is stuck is not waited for. Nothing is lost: it
/// continues with the revision after the last one.
const STREAM_TIME: Duration = Duration::from_secs(5);
/// An endpoint that cannot be watched is followed by another one after this time.
const RETRY_TIME: Duration = Duration::from_millis(200);

struct Stream {
    connection: HttpConnection,
    opened: Instant,
}

/// Changes of all keys with the cluster's prefix.
pub(super) struct EtcdChanges {
    client: Arc<EtcdClient>,
    endpoint: usize,
    stream: Option<Stream>,
    /// The revision to continue with; 0 if what was before must be read.
    next_revision: i64,
}

impl EtcdChanges {
    pub(super) fn new(client: Arc<EtcdClient>) -> EtcdChanges {
        EtcdChanges { client, endpoint: 0, stream: None, next_revision: 0 }
    }

    fn open(&self) -> Result<Stream, HttpError> {
        let location = &self.client.location;
        let mut connection = HttpConnection::open(&location.endpoints[self.endpoint], ANSWER_TIME)?;
        let request = json!({ "create_request": {
            "key": base64(&location.prefix),
            "range_end": base64(end_of_prefix(&location.prefix)),
            "start_revision": self.next_revision.to_string(),
        } });
        connection.send("/v3/watch", request.to_string().as_bytes())?;
        Ok(Stream { connection, opened: Instant::now() })
    }

    fn wait_in_stream(&mut self, limit: Duration) -> Result<Vec<MapChange>, HttpError> {
        let is_new = self.stream.is_none();
        if is_new {
            self.stream = Some(self.open()?);
        }
        let stream = self.stream.as_mut().expect("it was opened");
        if !is_new && stream.opened.elapsed() >= STREAM_TIME {
            self.stream = None;
            return Ok(Vec::new());
        }
        let limit = if is_new { ANSWER_TIME } else { limit };
        let Some(line) = stream.connection.receive_line(limit)? else {
            return if is_new { Err(HttpError::TimedOut(ANSWER_TIME)) } else { Ok(Vec::new()) };
        };
        if stream.connection.is_success() != Some(true) {
            return Err(HttpError::Malformed("a watch is refused"));
        }
        let line: StreamLine<WatchAnswer> = serde_json::from_slice(&line)
            .map_err(|_| HttpError::Malformed("a line of a watch is no JSON of etcd's"))?;
        let Some(answer) = line.result.filter(|_| line.error.is_none_or(|error| error == Value::Null)) else {
            return Err(HttpError::Malformed("a watch ends with an error"));
        };
        if answer.canceled {
            // What was to be continued is compacted: all is read anew.
            self.next_revision = 0;
            self.stream = None;
            return Ok(Vec::new());
        }
        if answer.created && self.next_revision == 0 {
            self.next_revision = answer.header.revision + 1;
            return Ok(vec![MapChange::Everything]);
        }
        if !answer.events.is_empty() {
            self.next_revision = answer.header.revision + 1;
        }
        Ok(answer.events.iter().map(|event| self.change(event)).collect())
    }

    fn change(&self, event: &WatchEvent) -> MapChange {
        let groups = format!("{}groups/", self.client.location.prefix);
        let group = event.kv.key.strip_prefix(groups.as_bytes());
        let group = group.and_then(|id| str::from_utf8(id).ok()?.parse().ok());
        match (group, serde_json::from_slice(&event.kv.value)) {
            (Some(id), Ok(record)) if event.kind != "DELETE" => MapChange::Group(GroupId(id), record),
            _ => MapChange::Other,
        }
    }
}

impl MapChanges for EtcdChanges {
    fn wait(&mut self, limit: Duration) -> Result<Vec<MapChange>, MapError> {
        self.wait_in_stream(limit).map_err(|error| {
            self.stream = None;
            let what = format!("in etcd at {}", self.client.location.endpoints[self.endpoint].authority);
            self.endpoint = (self.endpoint + 1) % self.client.location.endpoints.len();
            MapError::Storage { what, reason: error.to_string() }
        })
    }

    fn retry_after(&self) -> Duration {
        RETRY_TIME
    }
}
