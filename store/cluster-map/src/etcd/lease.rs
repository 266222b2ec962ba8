//! The lease of a node in etcd: a key that says that it is up, and one that says which process it is.
//!
//! Both go when the lease ends. Another process of the same node puts neither before that.

use serde_json::{Value, json};

use super::messages::{GrantAnswer, KeyValue, RenewAnswer, StreamLine, base64, put, revision_is, version_is};
use super::{ATTEMPTS_MAX, EtcdMap, busy, decode, encode};
use crate::{LeaseHolder, LeaseOutcome, MapError, NodeId};

impl EtcdMap {
    pub(super) fn renew(
        &self,
        node: NodeId,
        holder: &LeaseHolder,
        seconds: u32,
    ) -> Result<LeaseOutcome, MapError> {
        let mut lease = sync::lock(&self.lease);
        if let Some(id) = *lease {
            let request = json!({ "ID": id.to_string() });
            let answer: StreamLine<RenewAnswer> = self.client.post("/v3/lease/keepalive", &request)?;
            let is_there = answer.result.is_some_and(|answer| answer.seconds > 0);
            // An operator may have deleted it, or another process was in the place of this one.
            if is_there && self.holder(node)?.is_some_and(|found| found.lease == id) {
                return Ok(LeaseOutcome::Held);
            }
            *lease = None;
        }
        self.acquire(node, holder, seconds, &mut lease)
    }

    fn acquire(
        &self,
        node: NodeId,
        holder: &LeaseHolder,
        seconds: u32,
        lease: &mut Option<i64>,
    ) -> Result<LeaseOutcome, MapError> {
        let key = self.holder_key(node);
        let mut found = self.holder(node)?;
        let mut granted = None;
        for _ in 0..ATTEMPTS_MAX {
            if let Some(found) = &found {
                if granted.is_some_and(|id| id == found.lease) {
                    // The answer of an attempt was lost.
                    *lease = granted;
                    return Ok(LeaseOutcome::Held);
                }
                let known: LeaseHolder = decode("the process of a node", found)?;
                if !holder.replaces(&known) {
                    granted.map(|id| self.revoke_lease(id)).transpose()?;
                    return Ok(LeaseOutcome::Taken(known));
                }
            }
            let id = match granted {
                Some(id) => id,
                None => {
                    let request = json!({ "TTL": seconds.to_string() });
                    self.client.post::<GrantAnswer>("/v3/lease/grant", &request)?.id
                }
            };
            granted = Some(id);
            let mut puts =
                [put(&self.key(&format!("up/{}", node.0)), &encode(&seconds)), put(&key, &encode(holder))];
            puts.iter_mut().for_each(|put| put["lease"] = id.to_string().into());
            let compare =
                found.as_ref().map_or(version_is(&key, 0), |found| revision_is(&key, found.mod_revision));
            let request = json!({
                "compare": [compare],
                "success": puts.map(|put| json!({ "request_put": put })),
                "failure": [{ "request_range": { "key": base64(&key) } }],
            });
            let answer = self.transaction(&request)?;
            if answer.succeeded {
                *lease = Some(id);
                return Ok(LeaseOutcome::Held);
            }
            found = answer.into_record();
        }
        Err(busy("the process of a node"))
    }

    /// Ends the lease of this process.
    pub(super) fn revoke(&self) -> Result<(), MapError> {
        let lease = sync::lock(&self.lease).take();
        lease.map_or(Ok(()), |id| self.revoke_lease(id))
    }

    fn revoke_lease(&self, id: i64) -> Result<(), MapError> {
        let request = json!({ "ID": id.to_string() });
        self.client.post::<Value>("/v3/lease/revoke", &request).map(drop)
    }

    fn holder_key(&self, node: NodeId) -> String {
        self.key(&format!("holders/{}", node.0))
    }

    fn holder(&self, node: NodeId) -> Result<Option<KeyValue>, MapError> {
        self.client.get(&self.holder_key(node))
    }
}
