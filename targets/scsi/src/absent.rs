//! LUNs without a logical unit.

use wire_scsi::{AdditionalSense, Cdb, ScsiStatus, Sense, SenseFormat};

use crate::identity;
use crate::information::{encode_sense, list_luns};
use crate::operation::Answer;
use crate::response::{DataIn, Residual, Response, check};
use crate::task::Command;

/// Answers a command to a LUN that has no unit (SPC-4, section 6.4.1): INQUIRY, REPORT LUNS and REQUEST SENSE, and no
/// other.
pub fn absent_unit(command: &Command<'_>, luns: &[u16]) -> Response {
    let unsupported = Sense::illegal(AdditionalSense::LOGICAL_UNIT_NOT_SUPPORTED);
    let result = match Cdb::decode(command.cdb) {
        Ok(Cdb::Inquiry { page: None, allocation }) => {
            Ok(Answer::data(identity::standard_absent(), allocation))
        }
        Ok(Cdb::ReportLuns { select, allocation }) => list_luns(luns, select, allocation),
        Ok(Cdb::RequestSense { descriptor, allocation }) => {
            let format = if descriptor { SenseFormat::Descriptor } else { SenseFormat::Fixed };
            Ok(Answer::data(encode_sense(&unsupported, format), allocation))
        }
        _ => Err(check(unsupported)),
    };
    let expected = command.data_in_bytes.max(command.data_out_bytes);
    let sense_format = SenseFormat::Fixed;
    match result {
        Ok(Answer { mut data_in, .. }) => {
            let residual = Residual::of(data_in.len() as u64, expected);
            data_in.truncate(command.data_in_bytes as usize);
            let data = DataIn::Bytes(data_in);
            Response { status: ScsiStatus::Good, sense: None, sense_format, data, residual }
        }
        Err((status, sense)) => {
            Response { status, sense, sense_format, data: DataIn::None, residual: Residual::of(0, expected) }
        }
    }
}
