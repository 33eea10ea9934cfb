//! The phases of FaSST, read from the types of the requests in a packet.

use crate::flight::{Phase, Phases, Request};
use farside_remote::control::Ask;
use farside_remote::fabric::ServiceId;
use farside_remote::service::ADDRESS_SIZE;

/// Indices of the phases. The idle phase is the first.
const GET: usize = 1;
const LOCK: usize = 2;
const VALIDATE: usize = 3;
const LOG: usize = 4;
const BACKUP: usize = 5;
const COMMIT: usize = 6;
const ABORT: usize = 7;
const CLOSE: usize = 8;
const RECOVER: usize = 9;
const LEASE: usize = 10;
const CATALOG: usize = 11;

/// The phases are in the order of the constants.
pub(super) static PHASES: Phases = Phases {
    all: &[
        Phase::new("idle").rare(),
        Phase::new("get"),
        Phase::new("lock"),
        Phase::new("validate"),
        Phase::new("log"),
        // Backups get the values.
        Phase::new("backup").rare(),
        Phase::new("commit"),
        Phase::new("abort").rare(),
        Phase::new("close").rare(),
        // A recoverer, or the next holder of an id, raises its epoch and looks at its lanes. A recoverer reads records.
        Phase::new("recover").rare().of_openings(),
        // The word of a lease. Nothing else is done by chains.
        Phase::new("lease").rare().of_openings(),
        Phase::new("catalog").rare().of_openings(),
    ],
    of: |request, _| match request {
        Request::Call(ServiceId::NODE, request) => match serde_json::from_slice(request) {
            Ok(Ask::Fence { .. }) => unreachable!("a client of FaSST is ended by its epoch"),
            _ => CATALOG,
        },
        Request::Call(_, request) => phase_of(request),
        Request::Chain(_) => LEASE,
    },
};

/// Place of the type of the first request in a call, after the store's secret and the header of the packet.
const FIRST_TYPE: usize = ADDRESS_SIZE + 24;

/// Returns the phase of a packet. All its requests have one type.
fn phase_of(request: &[u8]) -> usize {
    match request.get(FIRST_TYPE) {
        Some(1) => GET,
        Some(2) => LOCK,
        Some(3) => VALIDATE,
        Some(4) => LOG,
        Some(5) => BACKUP,
        Some(6) => COMMIT,
        Some(7) => ABORT,
        Some(8) => CLOSE,
        Some(9..=12) => RECOVER,
        kind => panic!("FaSST has no requests of the type {kind:?}"),
    }
}
