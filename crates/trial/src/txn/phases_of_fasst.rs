//! The phases of FaSST, read from the types of the requests in a packet.

use crate::flight::{Phase, Phases, Request};
use farside_remote::control::Ask;
use farside_remote::fabric::ServiceId;
use farside_remote::service::ADDRESS_SIZE;

/// Indices of the phases. The idle phase is the first.
const GET: usize = 1;
const LOCK_GET: usize = 2;
const LOCK: usize = 3;
const VALIDATE: usize = 4;
const LOG: usize = 5;
const BACKUP: usize = 6;
const COMMIT: usize = 7;
const ABORT: usize = 8;
const CLOSE: usize = 9;
const RECOVER: usize = 10;
const LEASE: usize = 11;
const CATALOG: usize = 12;
// Phases of a recoverer.
const LOOK: usize = 13;
const JOIN: usize = 14;
const PROMISE: usize = 15;
const ACCEPT: usize = 16;
const REVOKE: usize = 17;
/// Settles transactions, in a promotion or after a client's death.
const SETTLE: usize = 18;
const FILL: usize = 19;
const ENABLE: usize = 20;
const LEAVE: usize = 21;

/// The phases are in the order of the constants.
pub(super) static PHASES: Phases = Phases {
    all: &[
        Phase::new("idle").rare(),
        Phase::new("get"),
        // Keys that the transaction will write. Gets of other keys may share the packet.
        Phase::new("lock+get"),
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
        Phase::of_recoverers("look"),
        Phase::of_recoverers("join").rare().first(),
        Phase::of_recoverers("promise").rare(),
        Phase::of_recoverers("accept").rare(),
        Phase::of_recoverers("revoke").rare(),
        Phase::of_recoverers("settle"),
        Phase::of_recoverers("fill"),
        Phase::of_recoverers("enable").rare(),
        Phase::of_recoverers("leave").rare().first(),
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

/// Returns the phase of a recoverer's request. Before members are revoked, its chains look at leases.
pub(super) fn phase_of_recovery(request: Request<'_>, seen: u32) -> usize {
    match request {
        Request::Call(ServiceId::NODE, request) => match serde_json::from_slice(request) {
            Ok(Ask::PrepareStore { .. }) => JOIN,
            Ok(Ask::Promise { .. }) => PROMISE,
            Ok(Ask::Accept { .. }) => ACCEPT,
            Ok(Ask::Revoke { .. }) => REVOKE,
            Ok(Ask::Enable { .. }) => ENABLE,
            Ok(Ask::Leave { .. } | Ask::Decide { .. }) => LEAVE,
            _ => LOOK,
        },
        Request::Call(_, request) => match request.get(FIRST_TYPE) {
            Some(13) => FILL,
            _ => SETTLE,
        },
        Request::Chain(_) if seen >> REVOKE & 1 == 1 => FILL,
        Request::Chain(_) => LOOK,
    }
}

/// Place of the type of the first request in a call, after the store's secret and the header of the packet.
const FIRST_TYPE: usize = ADDRESS_SIZE + 24;

/// Returns the phase of a packet. All its requests have one type, except that gets may follow requests that lock and
/// get.
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
        Some(9..=13 | 15 | 16) => RECOVER,
        Some(14) => LOCK_GET,
        kind => panic!("FaSST has no requests of the type {kind:?}"),
    }
}
