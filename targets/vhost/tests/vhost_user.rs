//! The target against a front-end and driver that know only the specifications.
#![allow(clippy::unwrap_used)]

#[path = "vhost_user/frontend.rs"]
mod frontend;
#[path = "vhost_user/hostile.rs"]
mod hostile;
#[path = "vhost_user/io.rs"]
mod io;
#[path = "vhost_user/queues.rs"]
mod queues;
#[path = "vhost_user/scsi.rs"]
mod scsi;
#[path = "vhost_user/scsi_cores.rs"]
mod scsi_cores;
#[path = "vhost_user/scsi_scan.rs"]
mod scsi_scan;
#[path = "vhost_user/sessions.rs"]
mod sessions;
