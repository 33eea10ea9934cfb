//! A kind of store for tests, whose service has private state: it keeps reservations for its callers' sessions.
//!
//! The store lies in its table alone: a list of words that are not 0, one for each reservation that was ever made. The
//! service knows their number, and which sessions have reservations, from its own memory. A reservation is withdrawn by
//! a call that logs it, or with its session.

use farside_remote::Memory;
use farside_remote::arena::SEGMENT_SIZE;
use farside_remote::service::{Call, Context, Extent, Kind, Plan, Service};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

/// Number of words that one step of a recovery reads.
const PER_STEP: u64 = 16;
/// A word that no service writes.
pub(crate) const DAMAGED: u64 = u64::MAX;

/// The kind.
#[derive(Clone, Copy, Default)]
pub(crate) struct Keeper;

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    /// Returns the number of reservations that were ever made, and that of the caller's session.
    Look,
    /// Reserves. Returns the same.
    Reserve,
    /// Withdraws the reservations of the caller's session, by a record of the log.
    Withdraw,
}

impl<M: Memory> Kind<M> for Keeper {
    fn name(&self) -> &'static str {
        "keeper"
    }

    fn plan(&self, parameters: &str, quota: u64, _entropy: u64) -> Result<Plan, String> {
        let table_len = quota / SEGMENT_SIZE * SEGMENT_SIZE;
        Ok(Plan { table_len, parameters: parameters.to_owned(), wide: false })
    }

    fn is_table_only(&self) -> bool {
        true
    }

    fn serve(&self, _parameters: &str, table: Extent) -> Result<Box<dyn Service<M>>, String> {
        Ok(Box::new(Keeping { table, kept: Mutex::default() }))
    }
}

struct Keeping {
    table: Extent,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    /// Number of reservations that were ever made.
    made: u64,
    /// Number of reservations of each session.
    of: BTreeMap<u32, u64>,
}

impl Keeping {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().expect("no call panics")
    }
}

impl<M: Memory> Service<M> for Keeping {
    fn call(
        &self,
        Context { memory, log, .. }: Context<'_, M>,
        call: Call<'_>,
        answer: &mut Vec<u8>,
    ) -> Result<Result<(), String>, M::Wait> {
        let Some(session) = call.session else { return Ok(Err("call in a session".into())) };
        match call.request.first() {
            Some(&of) if of == Ask::Reserve as u8 => {
                let made = self.kept().made;
                memory.write(self.table.at + made * 8, &(made + 1).to_le_bytes())?;
                let mut kept = self.kept();
                kept.made += 1;
                *kept.of.entry(session).or_default() += 1;
            }
            Some(&of) if of == Ask::Withdraw as u8 => {
                answer.extend_from_slice(&session.to_le_bytes());
                log.append(answer);
                return Ok(Ok(()));
            }
            _ => {}
        }
        let kept = self.kept();
        for number in [kept.made, kept.of.get(&session).copied().unwrap_or(0)] {
            answer.extend_from_slice(&number.to_le_bytes());
        }
        Ok(Ok(()))
    }

    fn finish(
        &self,
        _context: Context<'_, M>,
        begun: &[u8],
        _answer: &mut Vec<u8>,
    ) -> Result<Result<(), String>, M::Wait> {
        let session = u32::from_le_bytes(begun.try_into().expect("the first part left four bytes"));
        let had = self.kept().of.remove(&session);
        Ok(had.map(drop).ok_or_else(|| "the session has no reservation any more".into()))
    }

    fn recover(&self, memory: &M, cursor: u64) -> Result<Result<Option<u64>, String>, M::Wait> {
        let mut bytes = [0; PER_STEP as usize * 8];
        memory.read(self.table.at + cursor * 8, &mut bytes)?;
        let words: Vec<u64> = bytes
            .chunks_exact(8)
            .map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")))
            .take_while(|&word| word != 0)
            .collect();
        if words.contains(&DAMAGED) {
            return Ok(Err("its table is damaged".into()));
        }
        self.kept().made = cursor + words.len() as u64;
        Ok(Ok((words.len() as u64 == PER_STEP).then_some(cursor + PER_STEP)))
    }

    fn sessions_ended(&self, gone: &dyn Fn(u32) -> bool) {
        self.kept().of.retain(|&session, _| !gone(session));
    }

    fn report(&self) -> Vec<(&'static str, u64)> {
        let kept = self.kept();
        vec![("made", kept.made), ("sessions_with_some", kept.of.len() as u64)]
    }

    fn live(&self, _memory: &M, _cursor: u64, _found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        Ok(None)
    }
}
