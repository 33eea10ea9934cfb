//! What every fabric must do, whoever runs the chains and whatever drives the tasks. A new fabric is one line here.

mod conformance;

use conformance::rig::{Local, Shm};

conformance!(local, Local);
conformance!(shm, Shm);
