//! Access control: tokens, the rights of each token per store, and lock-out of clients that guess tokens.
//!
//! A node without tokens permits everything to everyone. With tokens, a client without a known token gets no session,
//! and a session can do only what its token permits. The node stores only a token's hash, so a reader of the token file
//! cannot present any of the tokens. But sealed datagrams are encrypted with keys derived from the hashes, so such a
//! reader can read and forge them.
//! Invariant: every wrong token costs the same work and gets the same response.
//! Invariant: the memory spent on unknown clients is bounded.

use farside_fabrics::udp::seal::Shared;
use farside_remote::Rights;
use farside_remote::control::{Answer, Ask, NodeInfo, StoreStat};
use serde::de::value::{Error as ValueError, SeqDeserializer};
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

/// The name that stands for all stores without an entry of their own.
pub const EVERY_STORE: &str = "*";

/// The SHA-256 of a token's secret, which identifies the token. Its text form is 64 hexadecimal digits.
#[derive(Clone, Copy)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// The fingerprint of a token's `secret`.
    pub fn of(secret: &[u8]) -> Fingerprint {
        Fingerprint(Sha256::digest(secret).into())
    }

    /// Whether both fingerprints are equal. The comparison takes the same time, whichever byte differs.
    pub fn is(&self, other: &Fingerprint) -> bool {
        self.0.iter().zip(&other.0).fold(0, |all, (a, b)| all | (a ^ b)) == 0
    }

    /// The secret shared by a client and a node that know the token, which seals datagrams between them.
    pub fn shared(&self) -> Shared {
        Shared::new(self.0)
    }

    fn parse(text: &str) -> Option<Fingerprint> {
        let mut bytes = [0; 32];
        if text.len() != 2 * bytes.len() || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
        }
        Some(Fingerprint(bytes))
    }
}

impl std::fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Fingerprint") // The hash must not be logged: datagrams' keys derive from it.
    }
}

impl Serialize for Fingerprint {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let digits: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        serializer.serialize_str(&digits)
    }
}

impl<'de> Deserialize<'de> for Fingerprint {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Fingerprint, D::Error> {
        let text = String::deserialize(deserializer)?;
        Fingerprint::parse(&text).ok_or_else(|| {
            D::Error::custom(
                "invalid sha256 of a token: it needs 64 hexadecimal digits; create one with 'farside token new'",
            )
        })
    }
}

/// The rights to one store in a token file. Their form there is a list of words, or `all`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant(pub Rights);

impl Grant {
    /// Parses one right, or `all`.
    ///
    /// # Errors
    /// No right has this name; the error lists the valid names.
    pub fn parse(word: &str) -> Result<Grant, String> {
        if word == "all" {
            return Ok(Grant(Rights::ALL));
        }
        let right = Rights::deserialize(SeqDeserializer::<_, ValueError>::new([word].into_iter()));
        right.map(Grant).map_err(|error| format!("{error}; `all` grants all rights"))
    }
}

impl Serialize for Grant {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Grant {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Grant, D::Error> {
        #[derive(Clone, Copy)]
        struct Words;
        impl<'de> Visitor<'de> for Words {
            type Value = Grant;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a list of rights such as [\"read\", \"write\"], or \"all\"")
            }

            fn visit_str<E: Error>(self, word: &str) -> Result<Grant, E> {
                Grant::parse(word).map_err(E::custom)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut words: A) -> Result<Grant, A::Error> {
                let mut rights = Rights::NONE;
                while let Some(word) = words.next_element::<String>()? {
                    rights = rights | self.visit_str::<A::Error>(&word)?.0;
                }
                Ok(Grant(rights))
            }
        }
        deserializer.deserialize_any(Words)
    }
}

/// An entry of the token file.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Token {
    /// The token's name, for people and logs.
    pub name: String,
    /// SHA-256 of the token's secret.
    pub sha256: Fingerprint,
    /// Whether the token permits to create, drop, scan and list all stores.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub admin: bool,
    /// Rights per store; [`EVERY_STORE`] applies to stores that are not named.
    #[serde(default)]
    pub stores: BTreeMap<String, Grant>,
}

impl Token {
    /// The token's rights to the store named `store`.
    pub fn rights(&self, store: &str) -> Rights {
        let grant = self.stores.get(store).or_else(|| self.stores.get(EVERY_STORE));
        grant.map_or(Rights::NONE, |grant| grant.0)
    }

    /// Whether the token may know that the store exists.
    pub fn sees(&self, store: &str) -> bool {
        self.admin || self.rights(store) != Rights::NONE
    }

    /// Checks that the token permits a request.
    ///
    /// # Errors
    /// The token does not permit the request; the error names the missing right. A store that the token may not know of
    /// is refused like a missing store.
    pub fn judge(&self, ask: &Ask) -> Result<(), String> {
        let needs = |what: &str| {
            Err(format!(
                "the token '{}' does not permit this: it needs {what}; ask the node's administrator",
                self.name
            ))
        };
        match ask {
            Ask::OpenStore { name } | Ask::StoreStat { name } | Ask::FindStore { name }
                if !self.sees(name) =>
            {
                Err(self.no_store(name))
            }
            Ask::OpenStore { name } if self.rights(name) == Rights::NONE => needs("a right to the store"),
            Ask::StoreStat { name } if !self.rights(name).contains(Rights::READ) => {
                needs("the right 'read' to the store")
            }
            Ask::GrowStore { name }
            | Ask::Bind { name, .. }
            | Ask::Wall { name, .. }
            | Ask::Fence { name, .. }
                if !self.sees(name) =>
            {
                Err(self.no_store(name))
            }
            Ask::Bind { name, .. } | Ask::Wall { name, .. } if self.rights(name) == Rights::NONE => {
                needs("a right to the store")
            }
            Ask::Fence { name, .. } if !self.rights(name).contains(Rights::WRITE) => {
                needs("the right 'write' to the store")
            }
            Ask::GrowStore { name } if !self.rights(name).contains(Rights::ALLOCATE) => {
                needs("the right 'allocate' to the store")
            }
            Ask::CreateStore { .. }
            | Ask::PrepareStore { .. }
            | Ask::Decide { .. }
            | Ask::DropStore { .. }
            | Ask::RebuildStore { .. }
            | Ask::Scan { .. }
            | Ask::Promise { .. }
            | Ask::Accept { .. }
            | Ask::Revoke { .. }
            | Ask::Enable { .. }
            | Ask::Leave { .. }
                if !self.admin =>
            {
                needs("admin rights")
            }
            Ask::Revoke { name, .. } if self.rights(name) == Rights::NONE => needs("a right to the store"),
            _ => Ok(()),
        }
    }

    /// Error message for a store that is missing, or that the token may not know of.
    pub fn no_store(&self, name: &str) -> String {
        let may: Vec<&str> = self.stores.keys().map(String::as_str).collect();
        let may = if may.is_empty() { "none".to_owned() } else { may.join(", ") };
        format!("there is no store '{name}' that the token '{}' may open: it may open {may}", self.name)
    }

    /// Removes from a response what the token may not know. Lists contain only the stores that the token may open. Only
    /// admins see the processes and addresses of the node's host, and the traffic of all clients.
    pub fn may_know(&self, answer: Answer) -> Answer {
        match answer {
            Answer::Stores(mut stores) => {
                stores.retain(|store| self.sees(&store.name));
                Answer::Stores(stores)
            }
            Answer::NodeInfo(info) if !self.admin => {
                Answer::NodeInfo(NodeInfo { pid: 0, listening: Vec::new(), traffic: None, ..info })
            }
            Answer::StoreStat(stat) if !self.admin => {
                Answer::StoreStat(StoreStat { delaying_pids: Vec::new(), ..stat })
            }
            answer => answer,
        }
    }
}

/// A node's token file.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tokens {
    /// The tokens, in the file's order.
    #[serde(default)]
    pub token: Vec<Token>,
}

impl Tokens {
    /// Checks that the tokens are distinct, and have printable names.
    ///
    /// # Errors
    /// Two tokens are alike, or a token is invalid. The error names the token and the remedy.
    pub fn check(&self) -> Result<(), String> {
        let is_name = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        for (index, Token { name, sha256, stores, .. }) in self.token.iter().enumerate() {
            if name.is_empty() || name.len() > 64 || !name.chars().all(is_name) {
                return Err(format!(
                    "invalid token name {name:?}: use 1 to 64 letters, digits, '-', '_' or '.'"
                ));
            }
            let before = &self.token[..index];
            if before.iter().any(|other| other.name == *name) {
                return Err(format!("two tokens are named '{name}': rename one"));
            }
            if let Some(other) = before.iter().find(|other| other.sha256.is(sha256)) {
                return Err(format!(
                    "the tokens '{}' and '{name}' have the same sha256: create another with 'farside token new'",
                    other.name
                ));
            }
            if let Some((store, _)) = stores.iter().find(|(_, grant)| grant.0 == Rights::NONE) {
                return Err(format!(
                    "the token '{name}' has no right to the store '{store}': grant one, or remove the store"
                ));
            }
        }
        Ok(())
    }
}

/// The clients that a node admits.
#[derive(Debug)]
pub enum Access {
    /// Every client, with all rights.
    Everyone(Arc<Token>),
    /// Clients with one of these tokens. The number before a token is the name in the sealed datagrams of its clients.
    Tokens(Vec<(u64, Arc<Token>)>),
}

impl Access {
    /// Admits clients with one of these tokens, or everyone if `tokens` is `None`.
    pub fn new(tokens: Option<Tokens>) -> Access {
        match tokens {
            Some(tokens) => {
                let named = |token: Token| (token.sha256.shared().name(), Arc::new(token));
                Access::Tokens(tokens.token.into_iter().map(named).collect())
            }
            None => Access::Everyone(Arc::new(Token {
                name: "everyone".into(),
                sha256: Fingerprint([0; 32]),
                admin: true,
                stores: BTreeMap::from([(EVERY_STORE.into(), Grant(Rights::ALL))]),
            })),
        }
    }

    /// Whether a token is required.
    pub fn is_guarded(&self) -> bool {
        matches!(self, Access::Tokens(_))
    }

    /// The token with this secret. Always compares with all tokens, so the time does not depend on which token matches.
    pub fn admit(&self, secret: &[u8]) -> Option<Arc<Token>> {
        match self {
            Access::Everyone(everyone) => Some(Arc::clone(everyone)),
            Access::Tokens(tokens) => find(tokens, &Fingerprint::of(secret)),
        }
    }

    /// The shared secret of the token that has this name in sealed datagrams.
    pub fn shared(&self, name: u64) -> Option<Shared> {
        match self {
            Access::Everyone(_) => None,
            Access::Tokens(tokens) => {
                let token = tokens.iter().find(|(other, _)| *other == name);
                token.map(|(_, token)| token.sha256.shared())
            }
        }
    }

    /// The current version, with its current rights, of a token that a session presented earlier; `None` if the token
    /// was removed.
    pub fn renew(&self, token: &Token) -> Option<Arc<Token>> {
        match self {
            Access::Everyone(everyone) => Some(Arc::clone(everyone)),
            Access::Tokens(tokens) => find(tokens, &token.sha256),
        }
    }
}

fn find(tokens: &[(u64, Arc<Token>)], shown: &Fingerprint) -> Option<Arc<Token>> {
    let mut found = None;
    for (_, token) in tokens {
        if shown.is(&token.sha256) {
            found = Some(token);
        }
    }
    found.map(Arc::clone)
}

/// Origin of a connection: an IPv4 address, or the /64 network of an IPv6 address. A host can usually send from every
/// address of its /64 network, so it could evade a limit per IPv6 address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Source(IpAddr);

impl From<IpAddr> for Source {
    fn from(address: IpAddr) -> Source {
        Source(match address.to_canonical() {
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
            address => address,
        })
    }
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            IpAddr::V4(address) => address.fmt(f),
            IpAddr::V6(address) => write!(f, "{address}/64"),
        }
    }
}

/// Number of wrong tokens from one source after which it is locked out.
pub const GUESSES_MAX: u32 = 8;
/// Time without a wrong token from a source after which the number of its wrong tokens restarts from 0.
pub const GUESSES_WITHIN: Duration = Duration::from_secs(60);
/// Time for which a source is locked out.
pub const LOCKED_FOR: Duration = Duration::from_secs(10);
/// Maximum number of sources whose wrong tokens are remembered.
pub const SOURCES_MAX: usize = 1024;

/// The recent wrong tokens and the lock-outs of each source.
#[derive(Debug, Default)]
pub struct Guesses {
    sources: BTreeMap<Source, Guessed>,
}

#[derive(Debug)]
struct Guessed {
    count: u32,
    last: Duration,
    locked_until: Duration,
}

impl Guesses {
    /// Remaining time of the source's lock-out, if it is locked out.
    pub fn locked_for(&self, source: Source, now: Duration) -> Option<Duration> {
        let left = self.sources.get(&source)?.locked_until.saturating_sub(now);
        (!left.is_zero()).then_some(left)
    }

    /// Records a wrong token from a source. Returns true if this token locks the source out, for [`LOCKED_FOR`].
    pub fn guessed(&mut self, source: Source, now: Duration) -> bool {
        if self.sources.len() >= SOURCES_MAX && !self.sources.contains_key(&source) {
            let oldest = self.sources.iter().min_by_key(|(_, guessed)| guessed.last);
            let oldest = oldest.map(|(&source, _)| source).expect("the map is full");
            self.sources.remove(&oldest);
        }
        let fresh = Guessed { count: 0, last: now, locked_until: Duration::ZERO };
        let guessed = self.sources.entry(source).or_insert(fresh);
        if now.saturating_sub(guessed.last) >= GUESSES_WITHIN {
            guessed.count = 0;
        }
        guessed.count += 1;
        guessed.last = now;
        let is_locked = guessed.count >= GUESSES_MAX;
        if is_locked {
            (guessed.count, guessed.locked_until) = (0, now + LOCKED_FOR);
        }
        is_locked
    }
}

/// Number of sessions of each source.
#[derive(Debug)]
pub struct SessionLimit {
    limit: u32,
    sources: BTreeMap<Source, u32>,
}

impl SessionLimit {
    /// Allows at most `limit` sessions per source. No session is open yet.
    pub fn new(limit: u32) -> SessionLimit {
        SessionLimit { limit, sources: BTreeMap::new() }
    }

    /// Records that a session of the source begins. Returns false if the source is at the limit already.
    pub fn enter(&mut self, source: Source) -> bool {
        let count = self.sources.entry(source).or_default();
        let may = *count < self.limit;
        *count += u32::from(may);
        may
    }

    /// Records that a session of the source has ended.
    pub fn leave(&mut self, source: Source) {
        let count = self.sources.get_mut(&source).expect("a session leaves after it entered");
        *count -= 1;
        if *count == 0 {
            self.sources.remove(&source);
        }
    }
}

/// Limits the rate of a log message.
#[derive(Debug, Default)]
pub struct LogLimit {
    not_before: Duration,
    suppressed: u64,
}

impl LogLimit {
    /// Minimum time between two messages of this limit.
    pub const PAUSE: Duration = Duration::from_secs(10);

    /// Counts an occurrence. If a message may be logged now, returns a suffix for it with the number of occurrences
    /// since the last message.
    pub fn may(&mut self, now: Duration) -> Option<String> {
        self.suppressed += 1;
        if now < self.not_before {
            return None;
        }
        self.not_before = now + LogLimit::PAUSE;
        Some(match std::mem::take(&mut self.suppressed) {
            1 => String::new(),
            times => format!("; {times} occurrences since the last report"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farside_remote::control::{Store, Traffic};

    fn token(name: &str, secret: &str, stores: &[(&str, Rights)]) -> Token {
        let stores = stores.iter().map(|&(store, rights)| (store.to_owned(), Grant(rights))).collect();
        Token { name: name.into(), sha256: Fingerprint::of(secret.as_bytes()), admin: false, stores }
    }

    fn source(last: u16) -> Source {
        IpAddr::from([10, 0, (last >> 8) as u8, last as u8]).into()
    }

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_fingerprint_is_sha_256_in_hexadecimal() {
        // The first example of FIPS 180-4.
        let digits = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let parsed = Fingerprint::parse(&digits.to_uppercase()).expect("digits of either case");
        assert!(parsed.is(&Fingerprint::of(b"abc")) && !parsed.is(&Fingerprint::of(b"abd")));
        assert_eq!(serde_json::to_value(parsed).expect("text"), digits);
        for wrong in ["", "ba78", &digits[1..], &digits.replace('b', "g"), &digits.replace("ba", "é")] {
            assert!(Fingerprint::parse(wrong).is_none(), "{wrong}");
        }
        for place in 0..32 {
            let mut other = parsed;
            other.0[place] ^= 1;
            assert!(!other.is(&parsed), "byte {place}");
        }
    }

    #[test]
    fn a_grant_parses_from_words_or_all() {
        let read = |text: &str| serde_json::from_str::<Grant>(text).map_err(|error| error.to_string());
        assert_eq!(read(r#"["read", "atomic"]"#), Ok(Grant(Rights::READ | Rights::ATOMIC)));
        assert_eq!(read(r#""read""#), Ok(Grant(Rights::READ)));
        assert_eq!((read(r#""all""#), read(r#"["all"]"#)), (Ok(Grant(Rights::ALL)), Ok(Grant(Rights::ALL))));
        assert_eq!(read("[]"), Ok(Grant(Rights::NONE)));
        for wrong in [r#""frob""#, r#"["read", "frob"]"#] {
            let error = read(wrong).expect_err("no such right");
            assert!(
                error.contains("`frob`") && error.contains("`allocate`") && error.contains("`all`"),
                "{error}"
            );
        }
        assert!(read("5").expect_err("no words").contains("a list of rights"));
    }

    #[test]
    fn a_token_opens_what_it_names_and_the_star_the_rest() {
        let token = token("t", "s", &[("a", Rights::READ), (EVERY_STORE, Rights::ALL)]);
        assert_eq!((token.rights("a"), token.rights("b")), (Rights::READ, Rights::ALL));
        let token = Token { stores: BTreeMap::from([("a".into(), Grant(Rights::READ))]), ..token };
        assert_eq!(token.rights("b"), Rights::NONE);
        assert!(token.sees("a") && !token.sees("b") && Token { admin: true, ..token }.sees("b"));
    }

    #[test]
    fn requests_need_the_rights_to_what_they_touch() {
        let name = || "a".to_owned();
        let create = Ask::CreateStore { name: name(), kind: "k".into(), parameters: String::new(), quota: 1 };
        let (attempt, configuration) = ([1, 2], 2);
        let admins = [
            create,
            Ask::DropStore { name: name() },
            Ask::Scan { name: name() },
            Ask::Promise { name: name(), attempt, configuration, ballot: [1, 1] },
            Ask::Enable { name: name(), attempt, configuration, members: Vec::new() },
        ];
        let (open, stat) = (Ask::OpenStore { name: name() }, Ask::StoreStat { name: name() });
        let (reader, writer) =
            (token("r", "s", &[("a", Rights::READ)]), token("w", "s", &[("a", Rights::WRITE)]));
        let stranger = token("s", "s", &[("b", Rights::ALL)]);
        let admin = Token { admin: true, ..token("d", "s", &[]) };
        let revoke = Ask::Revoke { name: name(), attempt, configuration };
        assert!(reader.judge(&revoke).expect_err("no admin").contains("admin rights"));
        assert!(admin.judge(&revoke).expect_err("no right").contains("a right to the store"));
        assert_eq!(Token { admin: true, ..token("b", "s", &[("a", Rights::ALL)]) }.judge(&revoke), Ok(()));
        for ask in &admins {
            assert_eq!(admin.judge(ask), Ok(()));
            for other in [&reader, &writer, &stranger] {
                assert!(other.judge(ask).expect_err("no admin").contains("admin rights"));
            }
        }
        for token in [&reader, &writer, &stranger, &admin] {
            assert_eq!((token.judge(&Ask::ListStores), token.judge(&Ask::NodeInfo)), (Ok(()), Ok(())));
        }
        assert_eq!((reader.judge(&open), reader.judge(&stat), writer.judge(&open)), (Ok(()), Ok(()), Ok(())));
        assert!(writer.judge(&stat).expect_err("it may not read").contains("'read'"));
        assert!(admin.judge(&open).expect_err("it may do nothing there").contains("a right to the store"));
        for ask in [&open, &stat] {
            let refusal = stranger.judge(ask).expect_err("it may not know of it");
            assert_eq!(refusal, stranger.no_store("a"), "the same as for a missing store");
        }
    }

    #[test]
    fn a_non_admin_sees_only_its_stores_and_nothing_of_the_host() {
        let store = |name: &str| Store {
            name: name.into(),
            kind: "k".into(),
            parameters: String::new(),
            quota: 0,
            incarnation: 0,
            region: 1,
            secret: 0,
            table_at: 0,
            table_len: 0,
            wide: false,
            created: 0,
            id: 0,
            former: None,
            membership: None,
        };
        let all = || Answer::Stores(vec![store("a"), store("b")]);
        let info = || {
            let (listening, traffic) = (vec!["tcp".into()], Some(Traffic::default()));
            Answer::NodeInfo(NodeInfo { pid: 7, listening, traffic, ..NodeInfo::default() })
        };
        let stat = || Answer::StoreStat(StoreStat { delaying_pids: vec![7], ..StoreStat::default() });
        let user = token("u", "s", &[("b", Rights::WRITE)]);
        assert_eq!(user.may_know(all()), Answer::Stores(vec![store("b")]));
        assert_eq!(user.may_know(info()), Answer::NodeInfo(NodeInfo::default()));
        assert_eq!(user.may_know(stat()), Answer::StoreStat(StoreStat::default()));
        let admin = Token { admin: true, ..user };
        for answer in [all(), info(), stat()] {
            assert_eq!(admin.may_know(answer.clone()), answer);
        }
    }

    #[test]
    fn tokens_are_found_by_secret_and_renewed_by_hash() {
        let tokens = [token("a", "one", &[]), token("b", "two", &[])].to_vec();
        let access = Access::new(Some(Tokens { token: tokens.clone() }));
        assert!(access.is_guarded());
        for (secret, name) in
            [("one", Some("a")), ("two", Some("b")), ("", None), ("on", None), ("onee", None)]
        {
            let admitted = access.admit(secret.as_bytes());
            assert_eq!(admitted.as_ref().map(|token| token.name.as_str()), name, "{secret}");
        }
        let b = access.admit(b"two").expect("it is known");
        let shared = |secret: &[u8]| access.shared(Fingerprint::of(secret).shared().name());
        assert!(shared(b"two").is_some_and(|shared| shared.name() == b.sha256.shared().name()));
        assert!(shared(b"three").is_none() && shared(b"one").is_some());
        let renamed = Token { name: "c".into(), admin: true, ..tokens[1].clone() };
        let later = Access::new(Some(Tokens { token: vec![renamed] }));
        assert!(later.renew(&b).is_some_and(|token| token.name == "c" && token.admin));
        assert!(later.renew(&tokens[0]).is_none());
        let open = Access::new(None);
        let everyone = open.admit(b"whatever").expect("everyone is admitted");
        assert!(!open.is_guarded() && everyone.admin && everyone.rights("any") == Rights::ALL);
        assert!(
            later.renew(&everyone).is_none(),
            "a session without a token is not renewed once tokens exist"
        );
    }

    #[test]
    fn duplicate_or_useless_tokens_are_refused_by_name() {
        let check = |tokens: &[Token]| Tokens { token: tokens.to_vec() }.check();
        let (a, b) = (token("a", "one", &[("s", Rights::READ)]), token("b", "two", &[]));
        assert_eq!(check(&[a.clone(), b.clone()]), Ok(()));
        let wrong = [
            (vec![a.clone(), Token { name: "a".into(), ..b.clone() }], "named 'a'"),
            (vec![a.clone(), Token { sha256: a.sha256, ..b.clone() }], "'a' and 'b'"),
            (vec![Token { name: String::new(), ..b.clone() }], "1 to 64 letters"),
            (vec![Token { name: "a\nb".into(), ..b }], "1 to 64 letters"),
            (vec![token("a", "one", &[("s", Rights::NONE)])], "store 's'"),
        ];
        for (tokens, named) in wrong {
            let reason = check(&tokens).expect_err(named);
            assert!(reason.contains(named), "{reason}");
        }
    }

    #[test]
    fn only_a_guessing_source_is_locked_out_for_a_while() {
        let mut guesses = Guesses::default();
        for guess in 1..=GUESSES_MAX {
            assert_eq!(guesses.locked_for(source(1), seconds(5)), None);
            assert_eq!(guesses.guessed(source(1), seconds(5)), guess == GUESSES_MAX);
        }
        assert_eq!(guesses.locked_for(source(1), seconds(6)), Some(LOCKED_FOR - seconds(1)));
        assert_eq!(guesses.locked_for(source(2), seconds(6)), None);
        assert_eq!(guesses.locked_for(source(1), seconds(5) + LOCKED_FOR), None);
        // After the lock-out, the source again has as many guesses as before.
        let later = seconds(5) + LOCKED_FOR;
        let locked: Vec<bool> = (0..GUESSES_MAX).map(|_| guesses.guessed(source(1), later)).collect();
        assert_eq!(locked.iter().position(|&is_locked| is_locked), Some(GUESSES_MAX as usize - 1));
    }

    #[test]
    fn old_guesses_do_not_count() {
        let mut guesses = Guesses::default();
        for guess in 0..100 {
            assert!(!guesses.guessed(source(1), GUESSES_WITHIN * guess), "one a minute is no attack");
        }
    }

    #[test]
    fn the_oldest_of_too_many_sources_is_forgotten() {
        let mut guesses = Guesses::default();
        for number in 0..=SOURCES_MAX as u16 {
            for _ in 0..GUESSES_MAX {
                guesses.guessed(source(number), Duration::from_millis(number.into()));
            }
        }
        assert_eq!(guesses.sources.len(), SOURCES_MAX);
        assert_eq!(guesses.locked_for(source(0), seconds(2)), None);
        assert!(
            (1..=SOURCES_MAX as u16).all(|number| guesses.locked_for(source(number), seconds(2)).is_some())
        );
    }

    #[test]
    fn a_source_is_an_ipv4_address_or_an_ipv6_network() {
        let of = |text: &str| Source::from(text.parse::<IpAddr>().expect("an address"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:0:0:2"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(
            (of("10.0.0.1").to_string(), of("2001:db8::1").to_string().as_str()),
            ("10.0.0.1".into(), "2001:db8::/64")
        );
    }

    #[test]
    fn a_source_has_a_limited_number_of_sessions() {
        let mut session_limit = SessionLimit::new(2);
        let [a, b] = [1, 2].map(source);
        assert!(session_limit.enter(a) && session_limit.enter(a) && !session_limit.enter(a));
        assert!(session_limit.enter(b));
        session_limit.leave(a);
        assert!(session_limit.enter(a) && !session_limit.enter(a));
        for who in [a, a, b] {
            session_limit.leave(who);
        }
        assert!(session_limit.sources.is_empty(), "no source is left");
    }

    #[test]
    fn a_limited_message_reports_how_often_it_occurred() {
        let mut log_limit = LogLimit::default();
        assert_eq!(log_limit.may(seconds(1)).as_deref(), Some(""));
        assert_eq!((log_limit.may(seconds(2)), log_limit.may(seconds(3))), (None, None));
        let said = log_limit.may(seconds(1) + LogLimit::PAUSE);
        assert_eq!(said.as_deref(), Some("; 3 occurrences since the last report"));
    }
}
