//! SET TARGET PORT GROUPS (SPC-4, section 6.45).

use wire_scsi::port_groups::{AccessReason, AccessState, decode_set_port_groups};
use wire_scsi::{AdditionalSense, Sense};

use super::{Answer, Operation, OperationContext, OperationEvent, Progress, bytes_of};
use crate::nexus::UnitNexus;
use crate::response::{Failure, check};

/// Changes the access states of target port groups: of all that the list names, or of none.
#[derive(Debug)]
pub(crate) struct SetPortGroups {
    /// More than 0.
    pub(crate) parameter_bytes: u32,
}

fn apply(list: &[u8], nexus: &UnitNexus) -> Result<(), Failure> {
    let cut = |_| check(Sense::illegal(AdditionalSense::PARAMETER_LIST_LENGTH_ERROR));
    let mut states = Vec::new();
    for (index, (group, code)) in decode_set_port_groups(list).map_err(cut)?.into_iter().enumerate() {
        let state = AccessState::from_wire(code);
        let state = state.ok_or(check(Sense::invalid_parameter(4 + 4 * index as u16, Some(3))))?;
        states.push((group, state));
    }
    let changed = nexus.unit().change_access(&states, AccessReason::Explicit, Some(nexus));
    // A group that is not there.
    if changed { Ok(()) } else { Err(check(Sense::invalid_parameter(6, None))) }
}

impl Operation for SetPortGroups {
    fn resume(&mut self, event: OperationEvent, context: &mut OperationContext<'_>) -> Progress {
        match event {
            OperationEvent::DataOut(data) => {
                let data_out_bytes = self.parameter_bytes.into();
                let result = apply(&bytes_of(&data), context.nexus);
                Progress::Done(result.map(|()| Answer { data_out_bytes, ..Answer::good() }))
            }
            _ => Progress::parameters(self.parameter_bytes, context),
        }
    }
}
