//! A kind of store for tests, whose service logs its puts: a table of registers, each with a stamp.
//!
//! A put draws a stamp and appends `| key | stamp | value | zeros |`. Once that is stored, it installs stamp and value
//! in the key's register, unless the register has a later stamp. Stamps come from a counter in memory.

use farside_remote::service::{Call, Context, Extent, Kind, Locks, Plan, Records, Service, Work};
use farside_remote::{Memory, Width};
use std::collections::BTreeSet;
use std::sync::Mutex;

/// Number of registers of a store.
pub(crate) const KEYS: u64 = 64;
/// Number of registers that one step of a checkpoint reads.
const PER_STEP: u64 = 8;

/// The kind. Its stores have logs.
#[derive(Clone, Copy, Default)]
pub(crate) struct Ledger {
    /// Whether a put installs its value before its record is stored: an error that tests must find.
    pub(crate) installs_early: bool,
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    /// Returns the stamp and the value of a key.
    Get(u64),
    /// Puts a value. Returns the stamp.
    Put(u64, u64),
    /// Puts a value with a record that has this number of words more. Returns the stamp.
    PutLong(u64, u64, u64),
}

impl Ask {
    /// Appends the request.
    pub(crate) fn encode(self, out: &mut Vec<u8>) {
        match self {
            Ask::Get(key) => out.extend_from_slice(&key.to_le_bytes()),
            Ask::Put(key, value) => {
                out.extend_from_slice(&key.to_le_bytes());
                out.extend_from_slice(&value.to_le_bytes());
            }
            Ask::PutLong(key, value, more) => put_words(out, &[key, value, more]),
        }
    }
}

/// The words of a request, a response or a record.
pub(crate) fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes"))).collect()
}

fn put_words(out: &mut Vec<u8>, words: &[u64]) {
    words.iter().for_each(|word| out.extend_from_slice(&word.to_le_bytes()));
}

impl<M: Memory> Kind<M> for Ledger {
    fn name(&self) -> &'static str {
        "ledger"
    }

    fn plan(&self, parameters: &str, _quota: u64, _entropy: u64) -> Result<Plan, String> {
        Ok(Plan { table_len: 1 << 16, parameters: parameters.to_owned(), wide: false })
    }

    fn is_logged(&self) -> bool {
        true
    }

    fn serve(&self, _parameters: &str, table: Extent) -> Result<Box<dyn Service<M>>, String> {
        Ok(Box::new(Registers {
            at: table.at,
            installs_early: self.installs_early,
            unanswered: Mutex::default(),
        }))
    }
}

struct Registers {
    at: u64,
    installs_early: bool,
    /// Keys whose last put is in the log and never was in the memory.
    unanswered: Mutex<BTreeSet<u64>>,
}

impl Registers {
    /// Address of a register: its stamp in the lower half, its value in the upper half.
    fn register_at(&self, key: u64) -> u64 {
        self.at + 16 + key % KEYS * 16
    }

    fn load<M: Memory>(&self, memory: &M, key: u64) -> Result<[u64; 2], M::Wait> {
        let word = memory.load(self.register_at(key), Width::W16)?;
        Ok([word as u64, (word >> 64) as u64])
    }

    fn install<M: Memory>(&self, memory: &M, [key, stamp, value]: [u64; 3]) -> Result<(), M::Wait> {
        let at = self.register_at(key);
        let mut old = memory.load(at, Width::W16)?;
        while (old as u64) < stamp {
            let new = u128::from(value) << 64 | u128::from(stamp);
            match memory.exchange(at, Width::W16, old, new)? {
                Ok(()) => break,
                Err(now) => old = now,
            }
        }
        Ok(())
    }

    /// Raises the counter of stamps to `least`, or by one if that is more.
    fn raise<M: Memory>(&self, memory: &M, least: Option<u64>) -> Result<u64, M::Wait> {
        let mut old = memory.load(self.at, Width::W8)?;
        loop {
            let new = least.map_or(old as u64 + 1, |least| least.max(old as u64));
            match memory.exchange(self.at, Width::W8, old, new.into())? {
                Ok(()) => return Ok(new),
                Err(now) => old = now,
            }
        }
    }
}

impl<M: Memory> Service<M> for Registers {
    fn call(
        &self,
        Context { memory, log, scratch, .. }: Context<'_, M>,
        call: Call<'_>,
        answer: &mut Vec<u8>,
    ) -> Result<Result<(), String>, M::Wait> {
        match words(call.request)[..] {
            [key] => {
                let [stamp, value] = self.load(memory, key)?;
                put_words(answer, &[stamp, value]);
            }
            [key, value] | [key, value, _] => {
                let stamp = self.raise(memory, None)?;
                if self.installs_early {
                    self.install(memory, [key, stamp, value])?;
                }
                put_words(answer, &[key, stamp, value]);
                let more = words(call.request).get(2).copied().unwrap_or(0);
                scratch.extend_from_slice(answer);
                scratch.resize(answer.len() + more as usize * 8, 0);
                log.append(scratch);
            }
            _ => return Ok(Err("a request has one to three words".into())),
        }
        Ok(Ok(()))
    }

    fn finish(
        &self,
        Context { memory, .. }: Context<'_, M>,
        begun: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<Result<(), String>, M::Wait> {
        let [key, stamp, value] = words(begun)[..] else {
            unreachable!("the first part has left three words")
        };
        self.install(memory, [key, stamp, value])?;
        put_words(answer, &[stamp]);
        Ok(Ok(()))
    }

    fn undo(&self, _context: Context<'_, M>, _begun: &[u8]) -> Result<(), M::Wait> {
        Ok(()) // A stamp that is not used harms nobody.
    }

    fn replay(
        &self,
        Context { memory, .. }: Context<'_, M>,
        record: &[u8],
    ) -> Result<Result<(), String>, M::Wait> {
        let [key, stamp, value, ..] = words(record)[..] else {
            return Ok(Err("a record has three words or more".into()));
        };
        self.install(memory, [key, stamp, value])?;
        self.raise(memory, Some(stamp))?;
        Ok(Ok(()))
    }

    fn check(&self, record: &[u8]) -> Result<(), String> {
        if words(record).len() < 3 { Err("a record has three words or more".into()) } else { Ok(()) }
    }

    fn compare(&self, memory: &M, record: &[u8]) -> Result<(), M::Wait> {
        if let [key, stamp, ..] = words(record)[..]
            && self.load(memory, key)?[0] < stamp
        {
            self.unanswered.lock().expect("no panic").insert(key % KEYS);
            self.raise(memory, Some(stamp))?;
        }
        Ok(())
    }

    fn take_back(&self, memory: &M, records: &mut Records) -> Result<bool, M::Wait> {
        let mut unanswered = self.unanswered.lock().expect("no panic");
        let Some(&key) = unanswered.first() else { return Ok(false) };
        let ([_, value], stamp) = (self.load(memory, key)?, self.raise(memory, None)?);
        let mut record = Vec::new();
        put_words(&mut record, &[key, stamp, value]);
        records.append(&record);
        Ok(unanswered.remove(&key))
    }

    fn checkpoint(&self, memory: &M, cursor: u64, records: &mut Records) -> Result<Option<u64>, M::Wait> {
        for key in cursor..(cursor + PER_STEP).min(KEYS) {
            let [stamp, value] = self.load(memory, key)?;
            if stamp > 0 {
                let mut record = Vec::new();
                put_words(&mut record, &[key, stamp, value]);
                records.append(&record);
            }
        }
        Ok((cursor + PER_STEP < KEYS).then_some(cursor + PER_STEP))
    }

    fn locks(&self, work: Work<'_>) -> Locks {
        match work {
            Work::Call(bytes) | Work::Finish(bytes) => Locks::of(words(bytes).first().copied().unwrap_or(0)),
            Work::Live | Work::Tick => Locks::NONE,
        }
    }

    fn live(&self, _memory: &M, _cursor: u64, _found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        Ok(None)
    }
}
