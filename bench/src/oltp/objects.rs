//! An object store: transactions read objects and write a share of them, as FaSST's public code has it (`app/tx-test`).
//!
//! All bytes of an object follow from its number and its count, to which each write adds one. A unit is an object, and
//! its total is its count.

use farside_systems::txn::Txn;

use super::{Added, Benchmark, Outcome, Stop};
use crate::driver::Kinds;
use crate::latched::{WORD, fill};
use crate::workload::{Distribution, KeyChooser, Random, key, unit};

/// Largest number of objects of a transaction.
pub const KEYS_MAX: usize = 32;

/// Number of draws for an object that a transaction does not have yet. After them it is the next one that is free: the
/// most skewed distributions hardly ever draw another object.
const DRAWS_MAX: u32 = 100;

/// The object store.
#[derive(Clone, Debug)]
pub struct Objects {
    objects: u64,
    len: usize,
    keys: usize,
    write_share: f64,
    chooser: KeyChooser,
}

/// Parameters of an object store.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Number of objects.
    pub objects: u64,
    /// Length of an object in bytes, 8 or more.
    pub len: usize,
    /// Number of objects of a transaction, 1 to [`KEYS_MAX`].
    pub keys: usize,
    /// Probability that a transaction writes an object that it has read.
    pub write_share: f64,
    /// Distribution of the objects.
    pub distribution: Distribution,
}

impl Objects {
    /// Creates the benchmark.
    ///
    /// # Errors
    /// There are fewer objects than a transaction has, or they are too short for their counts.
    pub fn new(plan: Plan) -> Result<Objects, String> {
        let Plan { objects, len, keys, write_share, distribution } = plan;
        if !(1..=KEYS_MAX).contains(&keys) {
            return Err(format!("a transaction has 1 to {KEYS_MAX} objects, not {keys}: give other --keys"));
        }
        if objects < keys as u64 {
            return Err(format!(
                "a transaction of {keys} keys needs as many objects, and there are {objects}: give more --records"
            ));
        }
        if len < WORD {
            return Err(format!(
                "an object of {len} bytes has no room for its count: give 8 or more --value-size"
            ));
        }
        if !(0.0..=1.0).contains(&write_share) {
            return Err(format!("{write_share} is no share: give 0 to 1 --write-share"));
        }
        let chooser = KeyChooser::new(distribution, objects, 0);
        Ok(Objects { objects, len, keys, write_share, chooser })
    }

    /// Draws which of a transaction's objects are written: a bit for each.
    fn written(&self, random: &mut Random) -> u32 {
        (0..self.keys).fold(0, |drawn, place| drawn | u32::from(unit(random) < self.write_share) << place)
    }

    /// Draws the objects of a transaction. They differ.
    fn drawn(&self, random: &mut Random) -> Vec<u64> {
        let (mut chooser, mut drawn) = (self.chooser.clone(), Vec::with_capacity(self.keys));
        for _ in 0..self.keys {
            let (mut object, mut draws) = (chooser.next(self.objects - 1, random), 1);
            while drawn.contains(&object) {
                draws += 1;
                let draws_on = draws <= DRAWS_MAX;
                object = if draws_on {
                    chooser.next(self.objects - 1, random)
                } else {
                    (object + 1) % self.objects
                };
            }
            drawn.push(object);
        }
        drawn
    }

    /// Writes the bytes of an object with this count.
    fn fill(&self, object: u64, count: u64, room: &mut Vec<u8>) {
        room.resize(self.len.next_multiple_of(WORD), 0);
        fill(object, count, room);
        room.truncate(self.len);
    }

    /// Reads an object, checks all its bytes, and returns its count.
    async fn count(&self, txn: &mut impl Txn, object: u64, room: &mut Vec<u8>) -> Result<u64, Stop> {
        let found = txn.get(&key(object)).await?.unwrap_or_default();
        let count = found.first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
        self.fill(object, count, room);
        match count > 0 && found == room {
            true => Ok(count),
            false => Err(Stop::Wrong(format!("object {object} has no value, or a wrong one"))),
        }
    }
}

const READ: usize = 0;
const UPDATE: usize = 1;

impl Benchmark for Objects {
    const KINDS: Kinds = &["read", "update"];

    fn units(&self) -> u64 {
        self.objects
    }

    fn rows_of_unit(&self) -> u64 {
        1
    }

    fn writes_max(&self) -> u64 {
        self.keys as u64
    }

    fn value_len(&self) -> usize {
        self.len
    }

    fn kind(&self, random: &mut Random) -> usize {
        if self.written(random) == 0 { READ } else { UPDATE }
    }

    async fn load<T: Txn>(&self, txn: &mut T, object: u64) -> Result<i64, Stop> {
        let mut room = Vec::new();
        self.fill(object, 1, &mut room);
        txn.put(&key(object), &room)?;
        Ok(1)
    }

    async fn run<T: Txn>(
        &self,
        txn: &mut T,
        random: &mut Random,
        added: &mut Added,
    ) -> Result<Outcome, Stop> {
        let (written, objects, mut room) = (self.written(random), self.drawn(random), Vec::new());
        let names: Vec<[u8; 8]> = objects.iter().map(|object| key(*object)).collect();
        let (to_write, to_read): (Vec<_>, Vec<_>) =
            names.iter().enumerate().partition(|(place, _)| written >> place & 1 == 1);
        let [to_write, to_read] =
            [to_write, to_read].map(|names| names.into_iter().map(|(_, name)| &name[..]).collect::<Vec<_>>());
        txn.fetch_to_write(&to_write, &to_read).await?;
        let mut counts = Vec::with_capacity(objects.len());
        for object in &objects {
            counts.push(self.count(txn, *object, &mut room).await?);
        }
        for (place, (object, count)) in objects.iter().zip(counts).enumerate() {
            if written >> place & 1 == 1 {
                self.fill(*object, count + 1, &mut room);
                txn.put(&key(*object), &room)?;
                added.push((*object, 1));
            }
        }
        Ok(Outcome::Done)
    }

    async fn audit<T: Txn>(&self, txn: &mut T, object: u64) -> Result<i64, Stop> {
        Ok(self.count(txn, object, &mut Vec::new()).await? as i64)
    }
}
