//! Numbers of a store, and what transactions must not leave behind.

use super::object::{Content, Header, Reading, decode};
use super::site::{Buffers, Site};
use super::{Client, Farm};
use crate::lease::ClientId;
use crate::txn::TxnError;
use farside_remote::clock::Clock;
use farside_remote::{Fabric, read, read_as};
use zerocopy::FromBytes;
use zerocopy::little_endian::U64;

/// Numbers of a store. If other clients change it meanwhile, the numbers are approximate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// Number of objects that the members have space for.
    pub objects: u64,
    /// Number of objects that keys have.
    pub keys: u64,
    /// Number of keys with a value.
    pub values: u64,
    /// Number of objects that are locked.
    pub locked: u64,
    /// Number of lanes with a transaction that is not settled, by member.
    pub open: u64,
    /// Number of copies whose content differs from that of their object.
    pub outdated: u64,
}

impl<F: Fabric + Clock> Farm<F> {
    /// Reads the numbers of the store. Reads all objects and their copies.
    ///
    /// # Errors
    /// [`TxnError`]; nothing was changed.
    pub async fn stat(&self) -> Result<Stat, TxnError> {
        let Client { site, .. } = &*self.client;
        site.fetch_keys().await?;
        let mut stat = Stat::default();
        for client in (1..=site.shards[0].spec().ids).filter_map(ClientId::new) {
            let states = site.look_at_all(client).await?;
            stat.open += states.iter().flatten().filter(|state| state.is_open()).count() as u64;
        }
        for shard in 0..site.shards.len() {
            site.add_shard(shard, &mut stat).await?;
        }
        Ok(stat)
    }
}

impl<F: Fabric + Clock> Site<F> {
    async fn add_shard(&self, shard: usize, stat: &mut Stat) -> Result<(), TxnError> {
        let of = &self.shards[shard];
        let mut own = Buffers::default();
        let mut chain = own.chain.begin(of.key());
        let used = chain.also(read_as::<U64>(of.table.used()));
        self.fabric.run(of.node, &chain, &mut own.reply).await.map_err(TxnError::of_read)?;
        let used = own.reply.get(used).map_err(TxnError::Refused)?.get();
        stat.objects += of.spec().objects;
        for object in 0..used.min(of.spec().objects) {
            let (header, content) = self.object(shard, 0, object, &mut own).await?;
            let is_value = Content::decode(&content).is_some_and(|content| content.value.is_some());
            stat.keys += 1;
            stat.values += u64::from(is_value);
            stat.locked += u64::from(header.is_locked());
            for part in 1..=of.spec().backups {
                let (copied, copy) = self.object(self.backup_of(shard, part), part, object, &mut own).await?;
                // A copy is first written with the first write of its object.
                let is_outdated = if header.version() == 0 { copied.version() != 0 } else { copy != content };
                stat.outdated += u64::from(is_outdated);
            }
        }
        Ok(())
    }

    /// Reads the header and the content of an object or of a copy.
    async fn object(
        &self,
        shard: usize,
        part: u8,
        object: u64,
        own: &mut Buffers,
    ) -> Result<(Header, Vec<u8>), TxnError> {
        let of = &self.shards[shard];
        let mut chain = own.chain.begin(of.key());
        let read = chain.also(read(of.table.object(part, object), of.spec().object_len() as u32));
        self.fabric.run(of.node, &chain, &mut own.reply).await.map_err(TxnError::of_read)?;
        let bytes = own.reply.get(read).map_err(TxnError::Refused)?;
        let (header, _) =
            Header::read_from_prefix(bytes).map_err(|_| TxnError::Damaged("a short READ of an object"))?;
        let mut content = Vec::new();
        match decode(of.spec().lines(), bytes, &mut content, false) {
            Reading::Whole(_) => {}
            _ => content.clear(),
        }
        Ok((header, content))
    }
}
