//! The phases of PRISM-TX, read from the ops of a request.

use crate::flight::{Phase, Phases, Request};
use farside_remote::control::Ask;
use farside_remote::wire::Code;
use farside_remote::{ChainView, Mode};

/// Indices of the phases. The idle phase is the first.
const READ: usize = 1;
pub(super) const CLAIM: usize = 2;
pub(super) const PREPARE: usize = 3;
pub(super) const COMMIT: usize = 4;
const ABORT: usize = 5;
const WORD: usize = 6;
const FENCE: usize = 7;
const CATALOG: usize = 8;

/// The phases are in the order of the constants.
pub(super) static PHASES: Phases = Phases {
    all: &[
        Phase::new("idle").rare(),
        Phase::new("read"),
        // A key gets its slot.
        Phase::allocating("claim").rare(),
        Phase::new("prepare"),
        Phase::allocating("commit"),
        Phase::new("abort"),
        // The word of a log entry, of a lease or of a reservation.
        Phase::new("word").rare(),
        Phase::new("fence").rare().led_to_by(PREPARE),
        Phase::new("catalog").rare(),
    ],
    of: |request, _| match request {
        Request::Call(_, request) => match serde_json::from_slice(request) {
            Ok(Ask::Fence { .. }) => FENCE,
            _ => CATALOG,
        },
        Request::Chain(chain) => phase_of(chain),
    },
};

/// Returns the phase of a chain, by its ops. The words of a slot have 16 bytes.
fn phase_of(chain: ChainView<'_>) -> usize {
    let has = |code: Code| chain.ops().any(|op| op.code() == code);
    let has_cas = |mode: Mode| {
        let is_of_slot = |width: u8| mode == Mode::Eq || width == 16;
        chain.ops().any(|op| {
            let header = op.header();
            op.code() == Code::Cas && header.mode == mode as u8 && is_of_slot(header.width)
        })
    };
    match chain.allocates() {
        0 if has_cas(Mode::Ge) => ABORT,
        0 if has_cas(Mode::Lt) => PREPARE,
        0 if has(Code::Cas) || has(Code::FetchAdd) => WORD,
        0 => READ,
        // The last ops of a prepare find out whether the member has memory.
        _ if chain.ops().last().is_some_and(|op| op.code() == Code::Allocate) => PREPARE,
        // An install swaps the timestamp, which the chain has written to scratch.
        _ if has(Code::Write) => COMMIT,
        _ => CLAIM,
    }
}
