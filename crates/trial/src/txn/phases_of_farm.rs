//! The phases of FaRM, read from the ops of its calls and chains.

use crate::flight::{Phase, Phases, Request};
use farside_remote::ChainView;
use farside_remote::control::Ask;
use farside_remote::fabric::ServiceId;
use farside_remote::service::ADDRESS_SIZE;
use farside_remote::wire::Code;

/// Indices of the phases. The idle phase is the first.
const READ: usize = 1;
const CLAIM: usize = 2;
const LOCK: usize = 3;
const VALIDATE: usize = 4;
const RECORD: usize = 5;
const COMMIT: usize = 6;
const ABORT: usize = 7;
const TRUNCATE: usize = 8;
const RECOVER: usize = 9;
const LEASE: usize = 10;
const FENCE: usize = 11;
const CATALOG: usize = 12;

/// The phases are in the order of the constants.
pub(super) static PHASES: Phases = Phases {
    all: &[
        Phase::new("idle").rare(),
        Phase::new("read"),
        // A key gets its object.
        Phase::new("claim").rare(),
        Phase::new("lock"),
        // Each opening has such requests, too: it reads the entries of leases.
        Phase::new("validate").of_openings(),
        // Backups get the record.
        Phase::new("record").rare(),
        Phase::new("commit"),
        Phase::new("abort").rare(),
        Phase::new("truncate").rare(),
        // A recoverer, or the next holder of an id, looks at its lanes. A recoverer copies records.
        Phase::new("recover").rare().of_openings(),
        // The word of a lease.
        Phase::new("lease").rare().of_openings(),
        Phase::new("fence").rare().led_to_by(LOCK),
        Phase::new("catalog").rare().of_openings(),
    ],
    of: |request, _| match request {
        Request::Call(ServiceId::NODE, request) => match serde_json::from_slice(request) {
            Ok(Ask::Fence { .. }) => FENCE,
            _ => CATALOG,
        },
        Request::Call(_, request) => phase_of_call(request),
        Request::Chain(chain) => phase_of_chain(chain),
    },
};

/// Returns the phase of a call, by the op that follows the store's secret.
fn phase_of_call(request: &[u8]) -> usize {
    match request.get(ADDRESS_SIZE) {
        Some(1) => CLAIM,
        Some(2) => LOCK,
        Some(3) => ABORT,
        Some(4) => VALIDATE,
        Some(5) => COMMIT,
        Some(6) => TRUNCATE,
        Some(7 | 8) => RECOVER,
        op => panic!("FaRM has no call with the op {op:?}"),
    }
}

/// Returns the phase of a chain, by its ops. The header of an object has 16 bytes, as has the entry of a lease. All
/// other READs are longer.
fn phase_of_chain(chain: ChainView<'_>) -> usize {
    let has = |code: Code| chain.ops().any(|op| op.code() == code);
    let is_of_headers = chain.ops().all(|op| op.header().len == 16);
    match () {
        () if has(Code::Cas) => LEASE,
        () if has(Code::Write) => RECORD,
        () if is_of_headers => VALIDATE,
        () => READ,
    }
}
