//! Options that concern all subsystems of the target.

use std::sync::Arc;

use reactor::ReactorHandle;
use sockets::ServerNetwork;
use target_shell::{CpuMaskError, mask_of_reactors, reactors_of_mask};

use super::{NvmfTarget, TargetState};
use crate::NvmfTargetError;
use crate::snapshot::TargetOptions;

impl<N: ServerNetwork> NvmfTarget<N> {
    /// Sets the options. Controllers that exist keep those with which they were created; hosts that asked for
    /// it get an event if a filter shows them another discovery log.
    ///
    /// # Errors
    /// The target is stopping, or a reactor does not respond.
    pub fn set_options(&self, options: TargetOptions) -> Result<(), NvmfTargetError> {
        let mut state = self.lock()?;
        let mut snapshot = (*state.published).clone();
        let previous = std::mem::replace(&mut snapshot.options, options);
        if previous.discovery_filter != options.discovery_filter {
            snapshot.discovery = state.next_discovery_log(&snapshot);
        }
        state.published = Arc::new(snapshot);
        let generation = self.0.publisher().publish(state.published.clone());
        self.wait_applied(generation)
    }

    /// The options.
    pub fn options(&self) -> TargetOptions {
        self.lock_any().published.options
    }

    /// Restricts the poll groups of transports to the reactors on these CPUs, a mask or a list; all without
    /// one.
    ///
    /// # Errors
    /// It is no mask, has a CPU without a reactor or none at all, or a transport is created already.
    pub fn set_poll_groups(&self, mask: Option<&str>) -> Result<(), NvmfTargetError> {
        let refused = |reason: String| NvmfTargetError::Parameter(format!("poll_groups_mask: {reason}"));
        let selected = reactors_of_mask(self.0.reactors(), mask).map_err(|error| match error {
            CpuMaskError::Syntax(error) => refused(error.to_string()),
            CpuMaskError::NoReactor(cpu) => refused(format!("there is no reactor on core {cpu}")),
        })?;
        if selected.is_empty() && mask.is_some() {
            return Err(refused("it selects no reactor".to_string()));
        }
        let mut state = self.lock()?;
        let present = self.poll_group_reactors(&state);
        let is_same = present.iter().map(ReactorHandle::index).eq(selected.iter().copied());
        if !is_same && !state.transports.is_empty() {
            return Err(refused("transports exist; set it before nvmf_create_transport".to_string()));
        }
        state.poll_groups = mask.map(|_| selected);
        Ok(())
    }

    /// The mask of the CPUs whose reactors have poll groups; `None` without a restriction.
    pub fn poll_groups_mask(&self) -> Option<String> {
        let state = self.lock_any();
        state.poll_groups.as_ref().map(|indexes| mask_of_reactors(self.0.reactors(), indexes))
    }

    /// The reactors that have a poll group of each transport.
    pub(super) fn poll_group_reactors(&self, state: &TargetState) -> Vec<ReactorHandle> {
        let has_group = |reactor: &&ReactorHandle| {
            state.poll_groups.as_ref().is_none_or(|indexes| indexes.contains(&reactor.index()))
        };
        self.0.reactors().iter().filter(has_group).cloned().collect()
    }
}
