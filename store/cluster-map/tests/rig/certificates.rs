//! A CA, and certificates of it.

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    date_time_ymd,
};

/// A CA.
pub(crate) struct Ca(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, in PEM.
pub(crate) struct Identity {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

impl Ca {
    pub(crate) fn new(name: &str) -> Ca {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Ca(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub(crate) fn pem(&self) -> String {
        self.0.pem()
    }

    /// A server's: for these hosts, valid until a year. etcd's gateway uses it as a client's too.
    pub(crate) fn server(&self, hosts: &[&str], until_year: i32) -> Identity {
        let mut params =
            CertificateParams::new(hosts.iter().map(ToString::to_string).collect::<Vec<_>>()).unwrap();
        params.distinguished_name.remove(DnType::CommonName);
        (params.not_before, params.not_after) = (date_time_ymd(2020, 1, 1), date_time_ymd(until_year, 1, 1));
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(&params)
    }

    /// A client's, with a name or without one.
    pub(crate) fn client(&self, name: &str) -> Identity {
        let mut params = CertificateParams::default();
        params.distinguished_name.remove(DnType::CommonName);
        if !name.is_empty() {
            params.distinguished_name.push(DnType::CommonName, name);
        }
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(&params)
    }

    fn sign(&self, params: &CertificateParams) -> Identity {
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap().pem();
        Identity { certificate, key: key.serialize_pem() }
    }
}
