//! The changes of a cluster's keys, as etcd streams them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::client::{ANSWER_TIME, EtcdClient};
use super::connection::{HttpConnection, HttpError};
use super::messages::{GatewayError, StreamLine, WatchAnswer, WatchEvent, base64, end_of_prefix};
use super::session::Token;
use crate::{GroupId, MapChange, MapChanges, MapError};

/// A stream is opened anew after this time, so that an endpoint that is stuck is not waited for. Nothing is
/// lost: it continues with the revision after the last one.
const STREAM_TIME: Duration = Duration::from_secs(5);
/// An endpoint that cannot be watched is followed by another one after this time.
const RETRY_TIME: Duration = Duration::from_millis(200);

struct Stream {
    connection: HttpConnection,
    token: Option<Token>,
    opened: Instant,
}

/// Why a watch ends.
enum WatchError {
    Http(HttpError),
    /// It has no token.
    Map(MapError),
    Refused(String),
}

impl From<HttpError> for WatchError {
    fn from(error: HttpError) -> WatchError {
        WatchError::Http(error)
    }
}

/// Changes of all keys with the cluster's prefix.
pub(super) struct EtcdChanges {
    client: Arc<EtcdClient>,
    endpoint: usize,
    stream: Option<Stream>,
    /// The revision to continue with; 0 if what was before must be read.
    next_revision: i64,
    /// A stream has ended with an error. What serves now may be an older copy, whose revisions say something
    /// else.
    has_failed: bool,
}

impl EtcdChanges {
    pub(super) fn new(client: Arc<EtcdClient>) -> EtcdChanges {
        EtcdChanges { client, endpoint: 0, stream: None, next_revision: 0, has_failed: false }
    }

    fn open(&self) -> Result<Stream, WatchError> {
        let token = self.client.token().map_err(WatchError::Map)?;
        let location = &self.client.location;
        let mut connection = self.client.connect(&location.endpoints[self.endpoint])?;
        let request = json!({ "create_request": {
            "key": base64(&location.prefix),
            "range_end": base64(end_of_prefix(&location.prefix)),
            "start_revision": self.next_revision.to_string(),
        } });
        let authorization = token.as_ref().map(Token::authorization);
        connection.send("/v3/watch", authorization, request.to_string().as_bytes(), ANSWER_TIME)?;
        Ok(Stream { connection, token, opened: Instant::now() })
    }

    fn wait_in_stream(&mut self, limit: Duration) -> Result<Vec<MapChange>, WatchError> {
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
            return if is_new { Err(HttpError::TimedOut(ANSWER_TIME).into()) } else { Ok(Vec::new()) };
        };
        let is_success = stream.connection.is_success() == Some(true);
        if !is_success {
            return self.refused(GatewayError::parse(&line).text().to_string());
        }
        let malformed = |_| HttpError::Malformed("a line of a watch is no JSON of etcd's");
        let parsed: StreamLine<WatchAnswer> = serde_json::from_slice(&line).map_err(malformed)?;
        let is_error = parsed.error.is_some_and(|error| error != Value::Null);
        let Some(answer) = parsed.result.filter(|_| !is_error) else {
            return self.refused(GatewayError::parse(&line).text().to_string());
        };
        if answer.canceled && answer.compact_revision == 0 {
            return self.refused(answer.cancel_reason);
        }
        if answer.canceled {
            // What was to be continued is compacted: all is read anew.
            self.next_revision = 0;
            self.stream = None;
            return Ok(Vec::new());
        }
        if answer.created {
            let is_behind = answer.header.revision + 1 < self.next_revision;
            let is_all = self.next_revision == 0 || is_behind || self.has_failed;
            self.has_failed = false;
            if is_behind {
                // It would be silent until it has as many revisions: it is opened again, where this one is.
                self.stream = None;
            }
            if self.next_revision == 0 || is_behind {
                self.next_revision = answer.header.revision + 1;
            }
            return Ok(if is_all { vec![MapChange::Everything] } else { Vec::new() });
        }
        if !answer.events.is_empty() {
            self.next_revision = answer.header.revision + 1;
        }
        // What nodes have seen, and what their scrubs found, changes all the time, and concerns no other node
        // while they run.
        let prefix = &self.client.location.prefix;
        let others = ["memory/", "scrubs/"].map(|records| format!("{prefix}{records}"));
        let is_change =
            |event: &&WatchEvent| !others.iter().any(|records| event.kv.key.starts_with(records.as_bytes()));
        Ok(answer.events.iter().filter(is_change).map(|event| self.change(event)).collect())
    }

    /// The watch is refused. Without an error it is to be opened again, with another token.
    fn refused(&mut self, reason: String) -> Result<Vec<MapChange>, WatchError> {
        let token = self.stream.take().and_then(|stream| stream.token);
        match self.client.refused_watch(token.as_ref(), &reason) {
            Some(reason) => Err(WatchError::Refused(reason)),
            None => Ok(Vec::new()),
        }
    }

    fn change(&self, event: &WatchEvent) -> MapChange {
        let groups = format!("{}groups/", self.client.location.prefix);
        let group = event.kv.key.strip_prefix(groups.as_bytes());
        let group = group.and_then(|id| str::from_utf8(id).ok()?.parse().ok());
        match (group, serde_json::from_slice(&event.kv.value)) {
            (Some(id), Ok(record)) if event.kind != "DELETE" => {
                self.client.groups.note(id, &event.kv.value);
                MapChange::Group(GroupId(id), record)
            }
            _ => MapChange::Other,
        }
    }
}

impl MapChanges for EtcdChanges {
    fn wait(&mut self, limit: Duration) -> Result<Vec<MapChange>, MapError> {
        self.wait_in_stream(limit).map_err(|error| {
            (self.stream, self.has_failed) = (None, true);
            let reason = match error {
                // Its request was made to all endpoints.
                WatchError::Map(error) => return error,
                WatchError::Http(error) => error.to_string(),
                WatchError::Refused(reason) => format!("a watch ends with an error: {reason}"),
            };
            let what = format!("in etcd at {}", self.client.location.endpoints[self.endpoint].authority);
            self.endpoint = (self.endpoint + 1) % self.client.location.endpoints.len();
            MapError::Storage { what, reason }
        })
    }

    fn retry_after(&self) -> Duration {
        RETRY_TIME
    }
}
