//! Reloading a configuration: the difference between two files, applied to a running program.
//!
//! What is compared are not texts, but [canonical calls](CanonicalCall): in the new file, in the one before,
//! and in what `save_config` writes at present. A call of the new file is in force if it equals one of the
//! file before or one that runs. So a file that spells the same in another way, or that `save_config` wrote,
//! changes nothing.
//!
//! An object is what the reverse of its creating call names: `bdev_null_create` is undone by
//! `bdev_null_delete`, of which the parameters are those of the same name. So two calls are about the same
//! object if their reverse calls are equal. Removed objects are deleted in reverse order, then new ones are
//! created, and what went with a removed object although the new file has it is made again. A call that has
//! no reverse is undone by the deletion of the object that it names. What cannot be done while the program
//! serves is refused, each with one line, and tried again at the next reload.

mod calls;
mod parts;

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use crate::config::{ConfigFile, ConfigStep};
use crate::{ControlPlane, MethodInfo, MethodKind, RpcError};
use calls::{CanonicalCall, ReverseCall, RunningCalls, without_identity};
use parts::{find_with_parts, has_lists, refuse_parts, restore_lists};

/// Parameters that are not to be read in a log.
const SECRETS: [&str; 6] = ["secret", "msecret", "psk", "password", "key", "key2"];

impl ConfigFile {
    /// Applies the difference between this configuration, which was applied before, and `new`. Returns what
    /// is in force now, for the next reload, and a line for each thing that was done or refused.
    pub fn reload(&self, new: &ConfigFile, plane: &ControlPlane) -> (ConfigFile, Vec<String>) {
        let _used = plane.use_bdevs(new.used_bdevs());
        let before = RunningCalls::of(plane);
        let old = self.steps.iter().map(|step| WantedCall::old(plane, step)).collect();
        let wanted: Result<Vec<WantedCall<'_>>, RpcError> =
            new.steps.iter().map(|step| WantedCall::new(plane, step)).collect();
        let wanted = match wanted {
            Ok(wanted) => wanted,
            Err(error) => {
                let line = format!("nothing is changed: {}: {}", new.origin, error.message);
                return (self.clone(), vec![line]);
            }
        };
        let mut reload = Reload::new(plane, before, old, wanted);
        reload.remove_old();
        let after = (!reload.deleted.is_empty()).then(|| RunningCalls::of(plane));
        reload.end_removal(after.as_ref());
        reload.add_new(after.as_ref());
        let Reload { wanted, mut lines, refused, .. } = reload;
        if lines.is_empty() {
            lines.push("nothing has changed".to_string());
        }
        // In the order of the new file; what was refused to go is first.
        let in_force = wanted.iter().filter(|call| call.state == State::InForce).map(|call| call.step);
        let steps = refused.into_iter().chain(in_force).cloned().collect();
        (ConfigFile { steps, ..new.clone() }, lines)
    }
}

/// A call of one of the files.
struct WantedCall<'a> {
    step: &'a ConfigStep,
    call: CanonicalCall,
    /// The call that runs for it, as it was before the reload.
    running: Option<usize>,
    /// The call that runs for the object that it adds to, if that has this part.
    part_of: Option<usize>,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing is to be done.
    InForce,
    /// Of the new file: it is to be made. Of the old one: it is to be undone.
    Changed,
    /// It cannot be made.
    Refused,
}

struct Reload<'a> {
    plane: &'a ControlPlane,
    before: RunningCalls,
    old: Vec<WantedCall<'a>>,
    wanted: Vec<WantedCall<'a>>,
    lines: Vec<String>,
    /// The calls that have undone others.
    deleted: Vec<ReverseCall>,
    /// What was not undone by a call of its own: places in `old` and `lines`, and why.
    remaining: Vec<(usize, usize, String)>,
    /// Old calls that stay in force.
    refused: Vec<&'a ConfigStep>,
    /// Everything that runs is of one of the files: what does not run need not be undone.
    is_complete: bool,
}

impl<'a> WantedCall<'a> {
    fn new(plane: &ControlPlane, step: &'a ConfigStep) -> Result<WantedCall<'a>, RpcError> {
        let call = CanonicalCall::new(plane, &step.method, step.params()).map_err(|error| {
            RpcError::new(error.code, format!("{}: {}: {}", step.position, step.method, error.message))
        })?;
        Ok(WantedCall { step, call, running: None, part_of: None, state: State::Changed })
    }

    /// Of a file that was accepted.
    fn old(plane: &ControlPlane, step: &'a ConfigStep) -> Option<WantedCall<'a>> {
        WantedCall::new(plane, step).ok()
    }
}

impl<'a> Reload<'a> {
    fn new(
        plane: &'a ControlPlane,
        before: RunningCalls,
        old: Vec<Option<WantedCall<'a>>>,
        mut wanted: Vec<WantedCall<'a>>,
    ) -> Reload<'a> {
        let mut old: Vec<WantedCall<'a>> = old.into_iter().flatten().collect();
        for calls in [&mut old, &mut wanted] {
            let running = before.find(calls.iter().map(|one| &one.call), plane.catalog());
            calls.iter_mut().zip(running).for_each(|(one, running)| one.running = running);
            find_with_parts(plane, &before, calls);
        }
        let described: HashSet<usize> = wanted.iter().filter_map(|one| one.running).collect();
        let mut same: HashMap<String, Vec<usize>> = HashMap::new();
        for (index, one) in old.iter().enumerate().rev() {
            same.entry(one.call.text()).or_default().push(index);
        }
        for one in &mut wanted {
            if let Some(index) = same.get_mut(&one.call.text()).and_then(Vec::pop) {
                old[index].state = State::InForce;
                one.running = one.running.or(old[index].running);
                one.state = State::InForce;
            } else if one.running.or(one.part_of).is_some()
                || plane.catalog().get(one.call.method).is_some_and(is_idle)
            {
                one.state = State::InForce;
            }
        }
        let has_running = !before.calls.is_empty();
        let in_use: HashSet<usize> = wanted.iter().filter_map(|one| one.running).collect();
        for one in &mut old {
            let has_effect = plane.catalog().get(one.call.method).is_some_and(has_effect);
            let is_in_use = one.running.is_some_and(|running| in_use.contains(&running));
            let is_part = one.part_of.is_some_and(|running| described.contains(&running));
            if !has_effect || is_in_use || is_part {
                one.state = State::InForce;
            }
        }
        let of_old = old.iter().filter_map(|one| one.running);
        let is_complete = of_old.chain(in_use).collect::<HashSet<usize>>().len() == before.calls.len();
        Reload {
            plane,
            before,
            old,
            wanted,
            lines: Vec::new(),
            deleted: Vec::new(),
            remaining: Vec::new(),
            refused: Vec::new(),
            is_complete: is_complete && has_running,
        }
    }

    /// Undoes the calls that the new file lacks.
    fn remove_old(&mut self) {
        for index in (0..self.old.len()).rev() {
            if self.old[index].state == State::Changed {
                self.remove(index);
            }
        }
    }

    fn remove(&mut self, index: usize) {
        let catalog = self.plane.catalog();
        let one = &self.old[index];
        // With what the method has assigned.
        let call = one.running.map_or(&one.call, |running| &self.before.calls[running]);
        let reverse = call.reverse(catalog);
        let is_unknown = one.running.or(one.part_of).is_none();
        if is_unknown && (self.is_complete || self.is_superseded(&one.call, reverse.as_ref())) {
            return;
        }
        let Some(reverse) = reverse else {
            // An option: another value for it is set with the others; its default cannot be, unless it has it
            // already.
            let initial = RunningCalls::from_saved(self.plane, self.plane.initial());
            let is_default = one.running.is_some() && initial.contains(call);
            // A further part is not another value.
            let is_replaced = one.part_of.is_none()
                && self
                    .wanted
                    .iter()
                    .any(|other| other.call.sets_same(&one.call) && other.state != State::Refused);
            if !is_replaced && !is_default {
                self.postpone(index, "it cannot be undone while the program runs");
            }
            return;
        };
        let changed = self.wanted.iter().position(|other| {
            other.state == State::Changed
                && !other.call.replaces(call)
                && other.call.object(catalog).as_ref() == Some(&reverse)
        });
        if let Some(changed) = changed {
            self.wanted[changed].state = State::Refused;
            let reason = "it exists with other parameters, and is in use; delete it first";
            self.lines.push(format!("refused: {}: {reason}", self.wanted[changed].step));
            self.refused.push(one.step);
            for part in refuse_parts(self.plane, &mut self.wanted, changed) {
                let reason = "what it changes exists with other parameters, and is in use";
                self.lines.push(format!("refused: {}: {reason}", self.wanted[part].step));
            }
            return;
        }
        match self.plane.invoke(reverse.method, Value::Object(reverse.params.clone())) {
            Ok(_) => {
                self.lines.push(format!("removed: {}", one.step));
                self.deleted.push(reverse);
            }
            // It is removed, and a bdev is free a little later.
            Err(error) if error.code == RpcError::EINPROGRESS => {
                self.lines.push(format!("removed: {}: {error}", one.step));
                self.deleted.push(reverse);
            }
            Err(error) => self.postpone(index, &error.to_string()),
        }
    }

    /// Whether a call that does not run in this form is part of one that does, and that the new file has:
    /// what it set is saved with the object that it concerns, or its object was changed since.
    fn is_superseded(&self, call: &CanonicalCall, reverse: Option<&ReverseCall>) -> bool {
        let object = reverse.and_then(|reverse| self.before.of_object(reverse));
        let mut runs = self.wanted.iter().filter(|other| other.running.is_some());
        runs.any(|other| {
            let of_object = || other.call.reverse(self.plane.catalog());
            (object.is_some() && other.running == object)
                || of_object().is_some_and(|object| object.removes(call))
        })
    }

    /// Decides at the end of the removal: a call is undone by the deletion of the object that it concerns.
    fn postpone(&mut self, index: usize, reason: &str) {
        self.remaining.push((index, self.lines.len(), reason.to_string()));
        self.lines.push(String::new());
    }

    fn end_removal(&mut self, after: Option<&RunningCalls>) {
        let remaining = std::mem::take(&mut self.remaining);
        let calls = remaining.iter().map(|(index, ..)| &self.old[*index].call);
        let runs = after.map(|after| after.find(calls, self.plane.catalog()));
        for (at, (index, line, reason)) in remaining.into_iter().enumerate() {
            let one = &self.old[index];
            let has_ended = one.running.is_some() && runs.as_ref().is_some_and(|runs| runs[at].is_none());
            if has_ended || self.deleted.iter().any(|deleted| deleted.removes(&one.call)) {
                self.lines[line] = format!("removed: {}", one.step);
            } else {
                self.lines[line] = format!("refused: {}: {reason}", one.step);
                self.refused.push(one.step);
            }
        }
    }

    /// Makes the calls that are new, and again those whose objects went with others.
    fn add_new(&mut self, after: Option<&RunningCalls>) {
        let now =
            after.map(|after| after.find(self.wanted.iter().map(|one| &one.call), self.plane.catalog()));
        // What runs for a call and for others that change the same object is not equal to the call.
        let is_lost: Vec<bool> = (self.wanted.iter().enumerate())
            .map(|(index, one)| {
                let ran = one.running.map(|running| &self.before.calls[running]);
                let runs = ran.is_some_and(|ran| after.is_some_and(|after| after.contains(ran)));
                now.as_ref().is_some_and(|now| now[index].is_none()) && !runs
            })
            .collect();
        for (index, is_lost) in is_lost.into_iter().enumerate() {
            let one = &self.wanted[index];
            let (what, made) = match (one.state, one.running) {
                (State::Changed, _) => (
                    "applied",
                    self.plane.invoke_configured(&one.step.method, one.step.params()).map(|_| true),
                ),
                (State::InForce, Some(running)) if is_lost => {
                    ("restored", self.restore(&one.call, &self.before.calls[running]))
                }
                _ => continue,
            };
            let is_query = self.plane.catalog().get(one.call.method).is_none_or(|info| !has_effect(info));
            let line = match &made {
                Ok(_) if is_query => String::new(),
                Ok(true) => format!("{what}: {}", one.step),
                Ok(false) => String::new(),
                Err(error) => format!("refused: {}: {error}", one.step),
            };
            self.wanted[index].state = if made.is_ok() { State::InForce } else { State::Refused };
            if !line.is_empty() {
                self.lines.push(line);
            }
        }
    }

    /// Makes again what ran as `ran`. Returns whether it had to be done.
    fn restore(&self, call: &CanonicalCall, ran: &CanonicalCall) -> Result<bool, RpcError> {
        let params = without_identity(ran, call);
        let Err(error) = self.plane.invoke(call.method, params.clone()) else { return Ok(true) };
        // It came back with what it stands on, or only a part of it is missing.
        let now = RunningCalls::of(self.plane);
        let catalog = self.plane.catalog();
        if now.find([call].into_iter(), catalog)[0].is_some() {
            return Ok(false);
        }
        let Some(object) = ran.object(catalog) else { return Err(error) };
        let exists = now.of_object(&object).map(|index| &now.calls[index]);
        match exists.filter(|_| has_lists(call.method)) {
            Some(exists) => restore_lists(self.plane, call.method, &params, exists)?,
            None if error.code == RpcError::EEXIST => {
                self.plane.invoke(object.method, Value::Object(object.params))?;
                self.plane.invoke(call.method, params)?;
            }
            None => return Err(error),
        }
        Ok(true)
    }
}

/// Whether a call of the method does nothing: what it accepts is so anyway.
fn is_idle(info: &MethodInfo) -> bool {
    info.kind == MethodKind::Query && info.default_only.is_some()
}

/// Whether a call of the method changes something.
fn has_effect(info: &MethodInfo) -> bool {
    info.kind != MethodKind::Query && info.default_only.is_none()
}

impl std::fmt::Display for ConfigStep {
    /// The method and its parameters that are no objects.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.method)?;
        for (name, value) in self.params().as_object().into_iter().flatten() {
            match value {
                _ if SECRETS.contains(&name.as_str()) => write!(formatter, " {name}=…")?,
                Value::String(text) => write!(formatter, " {name}={text}")?,
                value => write!(formatter, " {name}={}", without_secrets(value))?,
            }
        }
        Ok(())
    }
}

/// A value as a log may have it.
fn without_secrets(value: &Value) -> Value {
    match value {
        Value::Array(list) => list.iter().map(without_secrets).collect(),
        Value::Object(members) => {
            let shown = |(name, value): (&String, &Value)| {
                let is_secret = SECRETS.contains(&name.as_str()) && !value.is_null();
                (name.clone(), if is_secret { "…".into() } else { without_secrets(value) })
            };
            members.iter().map(shown).collect()
        }
        value => value.clone(),
    }
}

#[cfg(test)]
mod tests;
